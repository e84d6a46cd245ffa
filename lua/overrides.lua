-- Reads and changes the overrides of a store: other limits of single keys of a policy, for a time.
--
-- Each change is appended under a version; a later one of the same key replaces it. One that ends an override has expired already.
--
-- KEYS  a sorted set: a member for each change, a line for the policy, the key, the limit, the operator and the expiry each,
--       scored with its version; and the member `#` with the score -first: a caller that has an older version reads all, and so
--       does one whose version is not there, since a failover has lost it
-- ARGV  the version that the caller has read, and the most changes; for a change also how long the limit applies in microseconds,
--       and the lines before the expiry
-- reply one string: the time, the version, and 1 if all follows, as little-endian doubles; the changes since the version of the
--       caller, or all, separated by zero bytes

local key, known, most, length, lines = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4]

local count, first = call('ZCARD', key), 0 - tonumber(call('ZSCORE', key, '#') or '0')
local last = call('ZRANGE', key, '-1', '-1', 'WITHSCORES')[2]
local version = math.max(first, tonumber(last or '0'))
if count > most + 1 or count > 0 and first <= 0 or version > 9e15 then
  return redis.error_reply('WRONGTYPE ' .. key .. ' has ' .. count .. ' members, not overrides of this store; delete it')
end

-- Forgets the changes that have been replaced or have expired.
local function compact()
  local members, newer = call('ZRANGE', key, '0', '-1', 'WITHSCORES'), {}
  for i = #members - 1, 3, -2 do
    local subject, expires_at = string.match(members[i], '^(.-\n.-\n).*\n(%d+)$')
    local is_over = not subject or tonumber(expires_at) <= now
    if is_over or newer[subject] then
      call('ZREM', key, members[i])
    end
    if is_over then
      first = math.max(first, tonumber(members[i + 1]))
    end
    newer[subject or ''] = true
  end
  call('ZADD', key, -first, '#')
end

if lines then
  if count > most then
    compact()
  end
  if call('ZCARD', key) > most then
    return redis.error_reply('ERR the store has too many overrides; end some')
  end
  version = math.max(now, version + 1)
  if count == 0 then
    first = version
    call('ZADD', key, -first, '#')
  end
  -- Also after the clock is set back, one that has ended is over.
  local expires_at = length == '0' and 0 or now + tonumber(length)
  call('ZADD', key, version, lines .. string.format('%.0f', expires_at))
  -- The versions are kept for an hour after the last override.
  local keep = math.floor(tonumber(length) / 1000) + 3600000
  if call('PTTL', key) < keep then
    call('PEXPIREAT', key, expiry(now + 1000 * keep))
  end
end

local reads_all = known < first or known > version
local changes = {}
if known ~= version then
  local since = string.format('%.0f', known)
  -- The change of the first version may have expired and be forgotten.
  reads_all = reads_all or known > first and call('ZCOUNT', key, since, since) == 0
  changes = call('ZRANGEBYSCORE', key, reads_all and '0' or '(' .. since, '+inf')
end
return pack('<ddd', now, version, reads_all and 1 or 0) .. table.concat(changes, '\0')
