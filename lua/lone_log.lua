-- One check of a plain sliding log that has room, as most calls of a caller alone are, without what the rules need. Any other call
-- is left to the rules, also if a command fails here.

-- What is found of a log that is left to its rule: the members before its header, and if there is none, its size.
local lone_rank, lone_size

if #ARGV == 1 and string.sub(ARGV[1], 1, LONE_BYTES) == LONE_LOG then
  local quota, window, grain = unpack_numbers('<ddd', ARGV[1], LONE_BYTES + 1)
  if grain == 0 then
    local key, try, format = KEYS[1], redis.pcall, string.format
    local at, low = format('%s%06d', time[1], time[2]), window % 10000000
    local header = low == window and format('=%d', low) or format('=%d%07d', (window - low) / 10000000, low)
    local rank, total = try('ZREVRANK', key, header), nil
    if rank == false then
      lone_size = call('ZCARD', key)
      total = lone_size == 0 and try('ZADD', key, '0', header, at, at) == 2 and 1
    elseif type(rank) == 'number' and rank < quota and rank <= BUDGET - 2 then
      local expired = now - window
      low = expired % 10000000
      local removed = try('ZREMRANGEBYSCORE', key, '(0', format('%d%07d', (expired - low) / 10000000, low))
      total = type(removed) == 'number' and try('ZADD', key, at, at) == 1 and rank - removed + 1
    elseif type(rank) == 'number' then
      lone_rank = rank
    end
    if total then
      call('PEXPIREAT', key, expiry(now + window))
      return pack('<ddddd', now, 1, quota - total, 0, window)
    end
  end
end
