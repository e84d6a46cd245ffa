-- One check of a plain sliding log that has room, as most calls of a caller alone are, without what the rules need. Any other call
-- is left to the rules, also if a command fails here.

-- The members before the header of a full log, which the rule need not find again.
local full

if #ARGV == 1 and #ARGV[1] == LONE_LOG then
  local operation, requests, size, times, algorithm, role, cost, quota, window, grain =
    unpack_numbers('<sdddssdddd', ARGV[1])
  local is_lone = operation == 'check' and requests * size * times == 1
  if is_lone and algorithm == 'log' and role == '' and cost == 1 and grain == 0 then
    local key, try, format = KEYS[1], redis.pcall, string.format
    local at, low = format('%s%06d', time[1], time[2]), window % 10000000
    local header = low == window and format('=%d', low) or format('=%d%07d', (window - low) / 10000000, low)
    local stored, removed, added = try('ZREVRANK', key, header), 0, false
    if stored == false and try('ZCARD', key) == 0 then
      stored, added = 0, try('ZADD', key, '0', header, at, at) == 2
    elseif type(stored) == 'number' and stored < quota and stored <= BUDGET - 2 then
      local expired = now - window
      low = expired % 10000000
      removed = try('ZREMRANGEBYSCORE', key, '(0', format('%d%07d', (expired - low) / 10000000, low))
      added = type(removed) == 'number' and try('ZADD', key, at, at) == 1
    elseif type(stored) == 'number' then
      full = stored
    end
    if added then
      call('PEXPIREAT', key, expiry(now + window))
      return pack('<ddddd', now, 1, quota - stored + removed - 1, 0, window)
    end
  end
end
