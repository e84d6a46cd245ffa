-- Decides a batch of requests at one instant of the server's own clock.
--
-- KEYS  the keys of the charges, request after request
-- ARGV  runs of requests that look alike, each of them: `operation requests times charges`, where `times` is how many
--       callers send the same request, `3` of each or `1,5,2`, and for a refund, last, when it was admitted; then for each
--       charge: `algorithm cost`, what the algorithm reads, and its role, if it has one
-- reply little-endian doubles in one string: the time in microseconds, then for each charge of each request: how many of
--       its callers are admitted, remaining, the wait of the next caller (0: this charge fits), the time to a full reset;
--       the time alone where the boundaries of a calendar window do not enclose it, and then nothing was done.
--       Where requests failed, which have added nothing, a list: that string, with -n in place of the callers of the
--       nth of them, and the texts of their errors (`WRONGTYPE Operation ...`)
--
-- Times are microseconds and, like all numbers here, integers below 2^53. A call of one check spends more on what is
-- made here than on the check: a function costs as much as a third of a command, a number printed with `%.0f` or
-- a table with six names as much as one.

if redis.replicate_commands then
  redis.replicate_commands()
end

local call = redis.call
local ceil, floor, max, min = math.ceil, math.floor, math.max, math.min
local pack = struct.pack

-- How many entries one charge may read or remove.
local BOUND = 1000
-- How many of them are at the ends of a log and read one by one: the oldest one, and the newest one before and after a
-- removal.
local ENDS = 3
-- Into how many steps the window of a log is divided in which charges beyond the limit are merged.
local STEPS = 1000
-- How far ahead of the clock an entry may be and still belong to it; and how long a key outlives its use.
local SLACK = 1000000
-- Numbers are exact below this.
local EXACT = 9007199254740992
-- The most that is counted on one key.
local MAX_TOTAL = 4503599627370496

local time = call('TIME')
local now_text = time[1] .. string.rep('0', 6 - #time[2]) .. time[2]
local now = tonumber(now_text)

-- PEXPIREAT's argument for a key that matters until then: 13 digits, of which Lua prints 14.
local function expiry(at)
  return tostring(floor((at + SLACK) / 1000))
end

-- A time as text, of which Lua's own conversion keeps 14 digits. In two halves, which fit where a C long has 32 bits. The
-- last one is kept, since it is used again.
local text_of, printed = -1, nil
local function text(at)
  if at ~= text_of then
    text_of, printed = at, string.format('%d%06d', floor(at / 1000000), at % 1000000)
  end
  return printed
end
