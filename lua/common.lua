-- What the algorithms share, and which of them are asked for.

-- A number within a name: Lua's own conversion keeps 14 digits, and a time has 16. A number that Redis is given as such
-- keeps all of its digits.
local function text(number)
  return string.format('%.0f', number)
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
