-- Returns random bytes that all processes have in common: those that came first.
--
-- KEYS  a string of 32 bytes, which expires a year after it was last read
-- ARGV  those of this process

local key, expires = KEYS[1], expiry(now + YEAR_US)
local secret = call('GET', key)
if secret then
  call('PEXPIREAT', key, expires)
else
  secret = ARGV[1]
  call('SET', key, secret, 'PXAT', expires)
end
return secret
