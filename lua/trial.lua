-- The trial: runs each command of the scripts once, on a key that is gone afterwards, and replies with the first command that Redis
-- does not run, and its error. `TIME` ran before. A key that is an argument is not declared.

local key, expires = ARGV[1] or KEYS[1], expiry(now)
for _, command in ipairs({
  -- The first one is refused if there is no memory.
  { 'SET', key, '0', 'PXAT', expires },
  { 'SETRANGE', key, '0', '1' },
  { 'GET', key },
  { 'GETRANGE', key, '0', '0' },
  { 'PTTL', key },
  { 'UNLINK', key },
  { 'ZADD', key, '1', 'member' },
  { 'PEXPIREAT', key, expires },
  { 'ZINCRBY', key, '1', 'member' },
  { 'ZCARD', key },
  { 'ZCOUNT', key, '-inf', '+inf' },
  { 'ZSCORE', key, 'member' },
  { 'ZREVRANK', key, 'member' },
  { 'ZRANGE', key, '0', '0' },
  { 'ZRANGEBYSCORE', key, '0', '1', 'LIMIT', '0', '1' },
  { 'ZREVRANGEBYSCORE', key, '1', '0', 'LIMIT', '0', '1' },
  { 'ZREMRANGEBYRANK', key, '1', '1' },
  { 'ZREMRANGEBYSCORE', key, '0', '1' },
  { 'ZREM', key, 'member' },
}) do
  local answer = redis.pcall(unpack(command))
  if type(answer) == 'table' and answer.err then
    redis.pcall('UNLINK', key)
    return { pack('<d', now), command[1], string.match(answer.err, '%u%u+ [^\r\n]*') or 'ERR ' .. answer.err }
  end
end
return pack('<d', now)
