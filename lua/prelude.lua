-- Decides a batch of requests at one instant of the server's own clock.
--
-- KEYS  the keys of the charges, request after request
-- ARGV  the number of limits, the algorithm of each, then what each of these algorithms reads;
--       then, until the end, runs of requests that look alike:
--       operation, requests in the run, times (how many callers ask the same), charges,
--       and for each charge: the limit's position, the cost; for a refund, last, when it was admitted
-- reply the time in microseconds, then for each request: how many of its callers are admitted,
--       and for each charge: remaining, the wait of the next caller (0: this charge fits), the time to a full reset;
--       for a request that failed, which has added nothing, only the text of its error (`WRONGTYPE Operation ...`);
--       the time alone where the boundaries of a calendar window do not enclose it, and then nothing was done
--
-- Times are microseconds and, like all numbers here, integers below 2^53. A call of one check spends more on what is
-- made here than on the check, so nothing is made that is not asked for, and tables are made in their full size.

if redis.replicate_commands then
  redis.replicate_commands()
end

local call = redis.call
local ceil, floor, max, min = math.ceil, math.floor, math.max, math.min

-- How many entries one charge may read or remove.
local BOUND = 1000
-- How far ahead of the clock an entry may be and still belong to it; and how long a key outlives its use.
local SLACK = 1000000
-- Numbers are exact below this.
local EXACT = 9007199254740992
-- The most that is counted on one key.
local MAX_TOTAL = 4503599627370496

-- PEXPIRE's argument for a key that matters for `us` more microseconds.
local function ttl(us)
  return ceil((us + SLACK) / 1000)
end

local time = call('TIME')
local now_text = time[1] .. string.rep('0', 6 - #time[2]) .. time[2]
local now = tonumber(now_text)
