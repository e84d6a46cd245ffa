-- One check of cost 1 of a plain log, as most calls of a caller alone are, without the functions of the rule. Any other call is left to
-- them.

local callers, cost, quota, window
if #ARGV == 1 and #ARGV[1] == 48 then
  callers, cost, quota, window = unpack_numbers('<dddd', ARGV[1])
end
if callers == 1 and cost == 1 then
  local key = KEYS[1]
  local stored = call('ZREVRANK', key, '=')
  local is_new = not stored and call('ZCARD', key) == 0
  if is_new or stored and stored <= MOST_EXPIRED then
    local total = is_new and 0 or stored - call('ZREMRANGEBYSCORE', key, '(0', now - window)
    if total >= quota then
      local rank = string.format('%d', total + 1 - quota)
      local freed = tonumber(string.match(call('ZRANGE', key, rank, rank)[1], '^%d+'))
      local newest = tonumber(string.match(call('ZRANGE', key, '-1', '-1')[1], '^%d+'))
      -- Otherwise the clock was set back.
      if freed and newest and newest <= now then
        local reset = newest + window - now
        if now % CHANCE == 0 and call('PTTL', key) == -1 then
          call('PEXPIREAT', key, expiry(now + reset))
        end
        return pack('<ddddd', now, 0, 0, freed + window - now, reset)
      end
    else
      local micros = time[2] .. ''
      local at = time[1] .. string.sub('000000', #micros + 1) .. micros
      local added = is_new and call('ZADD', key, '0', '=', at, at) - 1 or call('ZADD', key, at, at)
      -- Another member of this microsecond has another name.
      if added == 1 then
        call('PEXPIREAT', key, expiry(now + window))
        return pack('<ddddd', now, 1, quota - total - 1, 0, window)
      end
    end
  end
end
