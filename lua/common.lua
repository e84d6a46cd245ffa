-- What the algorithms share.

-- Gives a key that has no expiry one.
local function keep(key, at)
  if call('PTTL', key) == -1 then
    call('PEXPIREAT', key, expiry(at))
  end
end

local function numbers_in(text)
  local numbers = {}
  for number in string.gmatch(text, '%d+') do
    numbers[#numbers + 1] = tonumber(number)
  end
  return numbers
end

-- What a key of numbers holds, or zeros where it holds anything else.
local function fetch(key)
  local a, b, c, expires = read(key)
  for _, number in ipairs({ a or -1, b, c, expires }) do
    if not (number >= 0 and number < EXACT) then
      return 0, 0, 0, 0
    end
  end
  return a, b, c, expires
end

-- By name: makes a charge. Its functions share the state of the key that was opened last.
local algorithms = {}
-- Whether the charge that is made is for a refund.
local refunding = false
-- Whether a charge met a time that the boundaries in it do not enclose.
local outside_calendar = false
