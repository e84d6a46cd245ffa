-- The driver: decides run after run, request by request. A request is admitted when all of its charges fit, and only
-- then is anything added. All of its keys are read before anything is added to one, so a request that fails has added
-- nothing, and those after it are decided as if it had not been there.

local runs = {}
-- The charges that were made, by place and argument: charges of one place among those of their request serve all runs, or
-- all refunds.
local made = {}

-- The charges of a run whose first argument is at this position.
local function charges_at(position, size)
  local charges = {}
  for i = 1, size do
    local argument = ARGV[position + i - 1]
    local place = refunding and -i or i
    made[place] = made[place] or {}
    if not made[place][argument] then
      local charge = algorithms[string.match(argument, '%a+')](unpack(numbers_in(argument)))
      charge.role = string.match(argument, ' (%a+)$')
      made[place][argument] = charge
    end
    charges[i] = made[place][argument]
  end
  return charges
end

do
  local position = 1
  while position <= #ARGV do
    local operation, requests, times, size, admitted_at =
      string.match(ARGV[position], '^(%a+) (%d+) ([%d,]+) (%d+) ?(%d*)$')
    requests, size = tonumber(requests), tonumber(size)
    refunding = operation == 'refund'
    local plain = operation == 'check' and size == 1 and plain(ARGV[position + 1])
    runs[#runs + 1] = {
      operation = operation,
      -- How many of the requests are decided.
      decided = position == 1 and passed or 0,
      requests = requests,
      plain = plain,
      -- How many callers each of them has; one number is for all.
      times = numbers_in(times),
      admitted_at = tonumber(admitted_at),
      first = position + 1,
      -- That of a plain run is made when the fast path ends. It has no calendar.
      charges = not plain and charges_at(position + 1, size),
    }
    position = position + 1 + size
  end
end

if outside_calendar then
  return reply[1]
end

local errors = {}
-- Where the fast path ended in a call of one run.
local short = #ARGV == 2 and passed

local function add_reply(admitted, remaining, wait, reset)
  length = length + 1
  reply[length] = pack('<dddd', admitted, remaining, wait, reset)
end

local function reset(_, charges, times)
  for i, charge in ipairs(charges) do
    -- Nothing reads the key afterwards: where its slot is moving to another node, that would be an error.
    call('UNLINK', KEYS[passed + i])
    add_reply(times, charge.quota, 0, 0)
  end
end

local function refund(run, charges, times)
  for i, charge in ipairs(charges) do
    charge.room = charge.open(KEYS[passed + i])
  end
  for _, charge in ipairs(charges) do
    local room = charge.role == 'checked' and charge.room or charge.refund(run.admitted_at, charge.cost)
    add_reply(times, room, 0, charge.reset())
  end
end

-- A charge without a role is counted. A `checked` one only needs room, and not once for each caller. One to count `once` is
-- a marker, which does not deny and counts with the next charge: if it has counted before and has room, that is exempt.
local function decide(run, charges, times)
  local admitted, exempt = times, false
  for i = 1, #charges do
    local charge = charges[i]
    local cost, role = charge.cost, charge.role
    local weight = role == 'checked' and cost or times * cost
    local room = charge.open(KEYS[passed + i])
    if room < weight then
      room = charge.reclaim and charge.reclaim() or room
    end
    local fits, marks, marked = room >= weight, role == 'once', charges[i + 1]
    charge.room, charge.full = room, marks and not fits
    charge.denies = not exempt and not marks
    charge.counts = not exempt and not role or marks and fits and marked and not marked.role
    if charge.denies and not fits then
      admitted = min(admitted, floor(room / cost))
    end
    exempt = marks and fits and room < charge.quota
  end

  local added = admitted
  if run.operation == 'charge' then
    admitted, added = times, times
  elseif run.operation == 'peek' then
    admitted, added = admitted > 0 and times or 0, 0
  end
  for i = 1, #charges do
    local charge = charges[i]
    local room, cost = charge.room, charge.cost
    if added > 0 and charge.counts then
      charge.add(added * cost)
      room = max(0, room - added * cost)
    end
    local lacks_room = charge.full or charge.denies and admitted < times and room < cost
    local wait = lacks_room and charge.wait() or 0
    add_reply(admitted, room, wait, charge.reset())
  end
end

-- Those requests of a run that are left, unless one fails.
local function go(run)
  local operation = decide
  if run.operation == 'reset' then
    operation = reset
  elseif run.operation == 'refund' then
    operation = refund
  end
  while run.decided < run.requests do
    local times = run.times[run.decided + 1] or run.times[1]
    local remaining, reset, wait
    if run.plain and passed ~= short then
      remaining, reset, wait = run.plain(KEYS[passed + 1], times)
    end
    if remaining then
      add_reply(wait and 0 or times, remaining, wait or 0, reset)
    else
      if not run.charges then
        refunding = false
        run.charges = charges_at(run.first, 1)
      end
      operation(run, run.charges, times)
    end
    passed = passed + (run.charges and #run.charges or 1)
    run.decided = run.decided + 1
  end
end

for _, run in ipairs(runs) do
  while run.decided < run.requests do
    local fine, answer = pcall(go, run)
    if not fine then
      -- From its code on: since Redis 7 an error comes in a table; before, it may follow the script's line.
      local message = type(answer) == 'table' and answer.err or answer
      errors[#errors + 1] = string.match(message, '%u%u+ [^\r\n]*') or 'ERR ' .. message
      length = passed + 1
      local size = run.charges and #run.charges or 1
      for _ = 1, size do
        add_reply(-#errors, 0, 0, 0)
      end
      passed = passed + size
      run.decided = run.decided + 1
    end
  end
end

local packed = table.concat(reply, '', 1, length)
if #errors > 0 then
  return { packed, unpack(errors) }
end
return packed
