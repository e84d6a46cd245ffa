-- The driver: reads the limits, then decides request by request. A request is admitted when all of its charges fit, and
-- only then is anything added. All of its keys are read before anything is added to one, so a request that fails has
-- added nothing, and those after it are decided as if it had not been there.

local position = 0

local function word()
  position = position + 1
  return ARGV[position]
end

local function take()
  return tonumber(word())
end

-- Only the algorithms at hand are made: a call of one check spends as much on that as on the check.
local made = {}

local function make(name)
  made[name] = made[name] or algorithms[name]()
  return made[name]
end

local limits = {}
for i = 1, take() do
  local algorithm = make(word())
  limits[i] = algorithm.limit(take)
  limits[i].algorithm = algorithm
end

if outside_calendar then
  return { now }
end

local reply, length = { now }, 1

local function answer(value)
  length = length + 1
  reply[length] = value
end

local function verdict(remaining, wait, reset)
  reply[length + 1], reply[length + 2], reply[length + 3] = remaining, wait, reset
  length = length + 3
end

-- The text of an error, from its code on. Since Redis 7 it comes in a table; before, it may follow the script's line.
local function explain(fault)
  local message = type(fault) == 'table' and fault.err or fault
  return match(message, '%u%u+ [^\r\n]*') or 'ERR ' .. message
end

local function reset(charges, times)
  answer(times)
  for _, charge in ipairs(charges) do
    call('UNLINK', charge.state.key)
    verdict(charge.limit.quota, 0, 0)
  end
end

local function refund(charges, times, _, at)
  for _, charge in ipairs(charges) do
    charge.algorithm.open(charge.state, charge.limit)
  end

  answer(times)
  for _, charge in ipairs(charges) do
    local algorithm, state, limit = charge.algorithm, charge.state, charge.limit
    algorithm.refund(state, limit, at, charge.cost)
    verdict(algorithm.room(state, limit), 0, algorithm.reset(state, limit))
  end
end

local function decide(charges, times, operation)
  local admitted = times
  for i = 1, #charges do
    local charge = charges[i]
    local algorithm, state, limit = charge.algorithm, charge.state, charge.limit
    algorithm.open(state, limit)
    charge.room = algorithm.room(state, limit)
    if charge.room < admitted * charge.cost then
      admitted = floor(charge.room / charge.cost)
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
      charge.room = max(0, charge.room - added * charge.cost)
    end
  end

  answer(admitted)
  for i = 1, #charges do
    local charge = charges[i]
    local algorithm, state, limit, room = charge.algorithm, charge.state, charge.limit, charge.room
    local wait = admitted < times and room < charge.cost and algorithm.wait(state, limit, charge.cost) or 0
    verdict(room, wait, algorithm.reset(state, limit))
  end
end

local operations = { check = decide, charge = decide, peek = decide, refund = refund, reset = reset }
local next_key = 1

while position < #ARGV do
  local operation, requests, times, size = word(), take(), take(), take()
  -- One table for each charge serves all requests of the run.
  local charges = {}
  for i = 1, size do
    local limit = limits[take()]
    charges[i] = { limit = limit, algorithm = limit.algorithm, cost = take(), state = {} }
  end
  local at = operation == 'refund' and take()
  local run = operations[operation]

  for _ = 1, requests do
    for i = 1, size do
      charges[i].state.key = KEYS[next_key]
      next_key = next_key + 1
    end
    local before = length
    local fine, fault = pcall(run, charges, times, operation, at)
    if not fine then
      while length > before do
        reply[length] = nil
        length = length - 1
      end
      answer(explain(fault))
    end
  end
end

return reply
