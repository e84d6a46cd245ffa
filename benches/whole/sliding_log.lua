-- Textbook sliding window log: a sorted set with a member for each admission.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local limit, window, member = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]

redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now - window)
local count = redis.call('ZCARD', KEYS[1])
if count >= limit then
  return { 0, 0 }
end

redis.call('ZADD', KEYS[1], now, member)
redis.call('PEXPIRE', KEYS[1], math.ceil(window / 1000))
return { 1, limit - count - 1 }
