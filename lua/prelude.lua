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

-- A number within a name: Lua's own conversion keeps 14 digits, and a time has 16. What Redis is given as a number keeps
-- all of them.
local function text(number)
  return string.format('%.0f', number)
end

-- PEXPIRE's argument for a key that matters for `us` more microseconds.
local function ttl(us)
  return ceil((us + SLACK) / 1000)
end

-- Gives a key that has no expiry one, for `us` more microseconds.
local function keep(key, us)
  if call('PTTL', key) == -1 then
    call('PEXPIRE', key, ttl(us))
  end
end

-- The three numbers that a key holds, or nothing where it holds anything else. They are little-endian doubles: to read
-- and write them as text costs more than the decision.
local function fetch(key)
  local value = call('GET', key)
  if not value or #value ~= 24 then
    return
  end

  local a, b, c = struct.unpack('<ddd', value)
  if a >= 0 and b >= 0 and c >= 0 and a < EXACT and b < EXACT and c < EXACT then
    -- Integers in a Lua that tells them from floats.
    return floor(a), floor(b), floor(c)
  end
end

-- Writes three numbers to a key that matters for `us` more microseconds.
local function store(key, us, a, b, c)
  call('SET', key, struct.pack('<ddd', a, b, c), 'PX', ttl(us))
end

local time = call('TIME')
local now_text = time[1] .. string.rep('0', 6 - #time[2]) .. time[2]
local now = tonumber(now_text)

-- Reads the arguments one by one.
local position = 0

local function word()
  position = position + 1
  return ARGV[position]
end

local function take()
  position = position + 1
  return ARGV[position] + 0
end

-- By name; here stands which ones are asked for.
local algorithms = {}
local limits = {}
for i = 1, take() do
  limits[i] = word()
  algorithms[limits[i]] = true
end
local outside_calendar = false
