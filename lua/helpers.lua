-- What several rules need.

local min, max, floor, ceil, match = math.min, math.max, math.floor, math.ceil, string.match

-- Gives a key that has no expiry one.
local function keep(key, til)
  if call('PTTL', key) == -1 then
    call('PEXPIREAT', key, expiry(til))
  end
end
