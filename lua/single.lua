-- One check of one charge, as most calls are: ARGV[1] is how many callers send it (0: none, so that Redis knows the script), the cost,
-- the quota, and the numbers of the limit. The reply is the time, how many callers are admitted, what remains, the wait of the next
-- one, and the time to a full reset.

local times, cost, quota, x, y, z = unpack_numbers('<dddddd', ARGV[1])
-- With room for what a rule keeps there.
local charge = { key = KEYS[1], cost = cost, quota = quota, x = x, y = y, z = z, total = 0, newest = false, used = 0 }

local room, fits, wait = rule.read(charge, times * cost), times, 0
if room < times * cost then
  fits = (room - room % cost) / cost
end
if fits > 0 then
  rule.add(charge, fits * cost, fits)
  room = room - fits * cost
end
local reset = rule.reset(charge)
if fits < times then
  wait = rule.wait(charge, cost)
  if fits == 0 then
    keep(charge.key, now + reset)
  end
end
return pack('<ddddd', now, fits, room, wait, reset)
