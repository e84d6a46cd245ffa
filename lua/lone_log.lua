-- One check of cost 1 of a plain log that has room, as most calls of a caller alone are, without the functions of the rule. Any other
-- call is left to them.

local callers, cost, quota, window = unpack_numbers('<dddd', ARGV[1])
if callers == 1 and cost == 1 and #ARGV == 1 and #KEYS == 1 then
  local key = KEYS[1]
  local stored = call('ZREVRANK', key, '=')
  if stored and stored < quota and stored <= MOST_EXPIRED or not stored and call('ZCARD', key) == 0 then
    local micros, total = time[2] .. '', nil
    local at = time[1] .. string.sub('000000', #micros + 1) .. micros
    if stored then
      total = stored + 1 - call('ZREMRANGEBYSCORE', key, '(0', now - window)
      -- Another member of this microsecond has another name.
      total = call('ZADD', key, at, at) == 1 and total
    else
      total = call('ZADD', key, '0', '=', at, at) - 1
    end
    if total then
      call('PEXPIREAT', key, expiry(now + window))
      return pack('<ddddd', now, 1, quota - total, 0, window)
    end
  end
end
