-- The driver: reads the limits, then decides request by request. A request is admitted when all of its charges fit, and
-- only then is anything added.

local position = 0

local function word()
  position = position + 1
  return ARGV[position]
end

local function number()
  return tonumber(word())
end

local limits = {}
for i = 1, number() do
  local algorithm = algorithms[word()]
  limits[i] = algorithm.limit(number)
  limits[i].algorithm = algorithm
end

if outside_calendar then
  return { now }
end

local reply = { now }

local function answer(value)
  reply[#reply + 1] = value
end

local function reset(times, charges)
  answer(times)
  for _, charge in ipairs(charges) do
    call('UNLINK', charge.key)
    answer(charge.limit.quota)
    answer(0)
    answer(0)
  end
end

local function refund(times, charges, at)
  answer(times)
  for _, charge in ipairs(charges) do
    local algorithm, limit = charge.limit.algorithm, charge.limit
    local state = algorithm.open(charge.key, limit)
    algorithm.refund(state, limit, at, charge.cost)
    answer(algorithm.room(state, limit))
    answer(0)
    answer(algorithm.reset(state, limit))
  end
end

local function decide(operation, times, charges)
  local admitted = times
  for _, charge in ipairs(charges) do
    charge.state = charge.limit.algorithm.open(charge.key, charge.limit)
    local room = charge.limit.algorithm.room(charge.state, charge.limit)
    admitted = math.min(admitted, math.floor(room / charge.cost))
  end

  local added = admitted
  if operation == 'charge' then
    admitted, added = times, times
  elseif operation == 'peek' then
    admitted, added = admitted > 0 and times or 0, 0
  end
  if added > 0 then
    for _, charge in ipairs(charges) do
      charge.limit.algorithm.add(charge.state, charge.limit, added * charge.cost)
    end
  end

  answer(admitted)
  for _, charge in ipairs(charges) do
    local algorithm = charge.limit.algorithm
    local room = algorithm.room(charge.state, charge.limit)
    answer(room)
    answer(admitted < times and room < charge.cost and algorithm.wait(charge.state, charge.limit, charge.cost) or 0)
    answer(algorithm.reset(charge.state, charge.limit))
  end
end

local next_key = 1

while position < #ARGV do
  local operation, requests, times, size = word(), number(), number(), number()
  local shape = {}
  for i = 1, size do
    shape[i] = { limit = limits[number()], cost = number() }
  end
  local admitted_at = operation == 'refund' and number()

  for _ = 1, requests do
    local charges = {}
    for i = 1, size do
      charges[i] = { key = KEYS[next_key], limit = shape[i].limit, cost = shape[i].cost }
      next_key = next_key + 1
    end
    if operation == 'reset' then
      reset(times, charges)
    elseif operation == 'refund' then
      refund(times, charges, admitted_at)
    else
      decide(operation, times, charges)
    end
  end
end

return reply
