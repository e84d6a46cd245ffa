-- What all scripts begin with: the time.
--
-- A script is this file, the files of the rules that it needs, and `checks.lua` or `driver.lua`. A function costs a call about 1,000
-- instructions, whether it is used or not, and a field of a table three times as much as a local variable. So `checks.lua` comes
-- without what only the driver needs of a rule, and a rule keeps what it has read in local variables.
--
-- A rule, such as the one of `log.lua`, has four functions. A charge is a table with its key, cost, quota and the numbers x, y and z of
-- its limit. What a rule has read is its state: up to five values, which the next functions get.
--
--   read(charge, needed)              forgets what does not count, and returns the weight that fits, and the state; `needed` is the
--                                     weight to add
--   add(charge, weight, count, ...)   adds the weight of so many requests, whether it fits or not, and returns the time until nothing
--                                     counts. The state is no longer that of the key
--   wait(charge, cost, ...)           returns the time until a cost fits that does not fit now, if nothing else is added, at least 1;
--                                     without a cost 0; and the time until nothing counts. It is called last, or never
--   give_back(charge, at, cost, ...)  takes back what was added at that time, as far as it still counts;
--                                     `charge.kept` was added with it and stays
--
-- For the line some have `wait_behind(charge, before, cost, ...)`, the time until a cost fits behind what is before it, or less.
--
-- Times are microseconds and, like all numbers here, integers below 2^53. Names in capitals are constants, which the store replaces by
-- their values.

local replicate_commands = redis.replicate_commands
if replicate_commands then
  replicate_commands()
end

local call, pack, unpack_numbers = redis.call, struct.pack, struct.unpack

-- Two texts, or two numbers in Dragonfly.
local time = call('TIME')
local now = time[1] * 1000000 + time[2]

-- The argument of PEXPIREAT for a key that matters until then. Commands get all digits of a number, as text does not; but of one that
-- ends in eight zeros Redis 7.2.0 to 7.2.4 make `1.8e+12` (redis/redis#13113).
local function expiry(at)
  at = at + SLACK
  at = (at - at % 1000) / 1000
  return at % 100000000 == 0 and at + 1 or at
end
