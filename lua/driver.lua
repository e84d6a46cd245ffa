-- The driver: reads the limits, then decides request by request. A request is admitted when all of its charges fit, and
-- only then is anything added. All of its keys are read before anything is added to one, so a request that fails has
-- added nothing, and those after it are decided as if it had not been there.

for i = 1, #limits do
  limits[i] = algorithms[limits[i]].limit()
end

if outside_calendar then
  return { now }
end

local function reset(charges, times)
  for _, charge in ipairs(charges) do
    call('UNLINK', charge.state.key)
    charge.remaining, charge.wait, charge.reset = charge.limit.quota, 0, 0
  end
  return times
end

local function refund(charges, times, at)
  for _, charge in ipairs(charges) do
    charge.algorithm.open(charge.state, charge.limit)
  end

  for _, charge in ipairs(charges) do
    local algorithm, state, limit = charge.algorithm, charge.state, charge.limit
    algorithm.refund(state, limit, at, charge.cost)
    charge.remaining, charge.wait, charge.reset = algorithm.room(state, limit), 0, algorithm.reset(state, limit)
  end
  return times
end

local function decide(charges, times, operation)
  local admitted = times
  for i = 1, #charges do
    local charge = charges[i]
    local algorithm, state, limit = charge.algorithm, charge.state, charge.limit
    algorithm.open(state, limit)
    charge.remaining = algorithm.room(state, limit)
    if charge.remaining < admitted * charge.cost then
      admitted = floor(charge.remaining / charge.cost)
    end
  end

  local added = admitted
  if operation == 'charge' then
    admitted, added = times, times
  elseif operation == 'peek' then
    admitted, added = admitted > 0 and times or 0, 0
  end
  if added > 0 then
    for i = 1, #charges do
      local charge = charges[i]
      charge.algorithm.add(charge.state, charge.limit, added * charge.cost)
      charge.remaining = max(0, charge.remaining - added * charge.cost)
    end
  end

  for i = 1, #charges do
    local charge = charges[i]
    local algorithm, state, limit = charge.algorithm, charge.state, charge.limit
    local short = admitted < times and charge.remaining < charge.cost
    charge.wait = short and algorithm.wait(state, limit, charge.cost) or 0
    charge.reset = algorithm.reset(state, limit)
  end
  return admitted
end

local reply, length = { now, nil, nil, nil, nil }, 1
local next_key = 1

while position < #ARGV do
  local operation, requests, times, size = word(), take(), take(), take()
  -- One table for each charge serves all requests of the run.
  local charges = {}
  for i = 1, size do
    local limit, cost = limits[take()], take()
    local algorithm = limit.algorithm
    charges[i] = {
      algorithm = algorithm,
      limit = limit,
      state = algorithm.state(),
      cost = cost,
      remaining = 0,
      wait = 0,
      reset = 0,
    }
  end
  local run, detail = decide, operation
  if operation == 'reset' then
    run = reset
  elseif operation == 'refund' then
    run, detail = refund, take()
  end

  for _ = 1, requests do
    for i = 1, size do
      charges[i].state.key = KEYS[next_key]
      next_key = next_key + 1
    end
    local fine, answer = pcall(run, charges, times, detail)
    length = length + 1
    if fine then
      reply[length] = answer
      for i = 1, size do
        local charge = charges[i]
        reply[length + 1], reply[length + 2], reply[length + 3] = charge.remaining, charge.wait, charge.reset
        length = length + 3
      end
    else
      -- From its code on: since Redis 7 an error comes in a table; before, it may follow the script's line.
      local message = type(answer) == 'table' and answer.err or answer
      reply[length] = string.match(message, '%u%u+ [^\r\n]*') or 'ERR ' .. message
    end
  end
end

return reply
