-- One check of cost 1 of a plain log that has room, as most calls of a caller alone are: without a function. Any other call is left to
-- the rule.

local times, cost, quota, x = unpack_numbers('<dddd', ARGV[1])
if times == 1 and cost == 1 then
  local key = KEYS[1]
  local stored = call('ZREVRANK', key, '=')
  local micros = time[2] .. ''
  local at = time[1] .. string.sub('000000', #micros + 1) .. micros
  local total
  if stored and stored < quota and stored <= BUDGET - 2 then
    total = stored + 1 - call('ZREMRANGEBYSCORE', key, '(0', digits(now - x))
    -- Another member of this microsecond has another name.
    total = call('ZADD', key, at, at) == 1 and total
  elseif not stored and call('ZCARD', key) == 0 then
    total = call('ZADD', key, '0', '=', at, at) - 1
  end
  if total then
    call('PEXPIREAT', key, expiry(now + x))
    return pack('<ddddd', now, 1, quota - total, 0, x)
  end
end
