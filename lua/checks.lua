-- Decides checks of one rule without bans and lines, as most are. `read`, `add` and `wait` are the functions of the rule.
--
-- KEYS  the keys of the charges, request after request; of a call across slots of a cluster, the first of them
-- ARGV  1. for each charge of a request how many callers send it, cost, quota, x, y and z
--       2. if there are more requests: how many have these charges; of a call across slots, how many arguments come before the keys, or
--          0; and if no callers send a charge, how many send each request
--       ... the same for other charges, and the keys of a call across slots
-- reply as that of `driver.lua`

if #ARGV == 1 and #ARGV[1] == 48 then
  -- One charge, of which all callers are admitted or none. What is left of other calls is decided below.
  local callers, cost, quota, x, y, z = unpack_numbers('<dddddd', ARGV[1])
  local charge = { key = KEYS[1], cost = cost, quota = quota, x = x, y = y, z = z }
  local room, a, b, c, d, e = read(charge, callers * cost)
  if room >= callers * cost then
    local reset = add(charge, callers * cost, callers, a, b, c, d, e)
    return pack('<ddddd', now, callers, room - callers * cost, 0, reset)
  elseif room < cost then
    local rest, reset = wait(charge, cost, a, b, c, d, e)
    if now % CHANCE == 0 and call('PTTL', charge.key) == -1 then
      call('PEXPIREAT', charge.key, expiry(now + reset))
    end
    return pack('<ddddd', now, 0, room, rest, reset)
  end
end

-- Decides a charge, which may have been read, and those after it in its request: reads all of them, then adds to all of them or to none.
-- `fits` is how many of the callers fit the charges before. Returns how many fit all.
local function decide(charge, callers, fits, keys, place, reply, room, a, b, c, d, e)
  local cost, rest, reset = charge.cost, 0, nil
  if not room then
    charge.key = keys[place]
    room, a, b, c, d, e = read(charge, callers * cost)
  end
  if room < fits * cost then
    fits = (room - room % cost) / cost
  end
  if charge.following then
    fits = decide(charge.following, callers, fits, keys, place + 1, reply)
  end

  if fits > 0 then
    reset = add(charge, fits * cost, fits, a, b, c, d, e)
    room = room - fits * cost
  end
  if fits < callers then
    if fits > 0 then
      local _
      _, a, b, c, d, e = read(charge, cost)
    end
    rest, reset = wait(charge, room < cost and cost, a, b, c, d, e)
    if fits == 0 and rest > 0 and now % CHANCE == 0 and call('PTTL', charge.key) == -1 then
      call('PEXPIREAT', charge.key, expiry(now + reset))
    end
  end
  reply[place + 1] = pack('<dddd', fits, room, rest, reset)
  return fits
end

-- Redis without memory says so until a script has written something; after that it would add keys without a bound. So it is asked
-- first, by a command that writes nothing.
local answer = redis.pcall(NOTHING)
local full = type(answer) == 'table' and answer.err and string.find(answer.err, 'OOM', 1, true) and answer.err

local keys, last, reply, errors, passed, nth = KEYS, #ARGV, { pack('<d', now) }, nil, 0, 0

-- Decides what is left of a run.
local function decide_rest(charge, size, callers, requests, count, keys, reply)
  local cost = charge.cost
  for left = nth, count - 1 do
    local times, place = callers > 0 and callers or unpack_numbers('<d', requests, 8 * left + 17), passed + size * left + 1
    for added = place, full and place + size - 1 or 0 do
      if call('PTTL', keys[added]) == -2 then
        error(full, 0)
      end
    end
    if size > 1 then
      decide(charge, times, times, keys, place, reply)
    else
      charge.key = keys[place]
      local needed = times * cost
      local room, a, b, c, d, e = read(charge, needed)
      if room >= needed then
        local reset = add(charge, needed, times, a, b, c, d, e)
        reply[place + 1] = pack('<dddd', times, room - needed, 0, reset)
      else
        decide(charge, times, times, keys, place, reply, room, a, b, c, d, e)
      end
    end
    nth = left + 1
  end
end

if last > 1 then
  local _, before_keys = unpack_numbers('<dd', ARGV[2])
  if before_keys > 0 then
    keys, last = {}, before_keys
    for n = last + 1, #ARGV do
      keys[n - last] = ARGV[n]
    end
  end
end
for n = 1, last, 2 do
  local charges, requests, first, callers, size = ARGV[n], ARGV[n + 1], nil, 0, 0
  for position = #charges - 47, 1, -48 do
    local times, cost, quota, x, y, z = unpack_numbers('<dddddd', charges, position)
    first = { following = first, cost = cost, quota = quota, x = x, y = y, z = z }
    callers, size = times, size + 1
  end
  local count = last > 1 and unpack_numbers('<d', requests) or 1
  nth = 0
  while nth < count do
    local fine, failure = pcall(decide_rest, first, size, callers, requests, count, keys, reply)
    if not fine then
      -- The request has added nothing. Its error is the reply, from its code on, which may follow the line of the script.
      errors = errors or {}
      errors[#errors + 1] = string.match(failure, '%u%u+ [^\r\n]*') or 'ERR ' .. failure
      for failed = passed + size * nth + 2, passed + size * nth + size + 1 do
        reply[failed] = pack('<dddd', -#errors, 0, 0, 0)
      end
      nth = nth + 1
    end
  end
  passed = passed + size * count
end
local packed = table.concat(reply)
return errors and { packed, unpack(errors) } or packed
