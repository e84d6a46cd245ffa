-- Reads and changes the overrides of a store: other limits of single keys of a policy, for a time.
--
-- KEYS  a sorted set: a member for each override, a line for the policy, the key and the limit each, scored with its expiry; and
--       the member `#` with the score -version; the version is higher after each change
-- ARGV  the version that the caller has read, as text; for a change also the lines of the policy and the key, the limit (empty to
--       end the override), how long it applies in microseconds, and the most overrides
-- reply one string: the time, the version and the number of overrides as little-endian doubles, and unless the caller has this
--       version, for each override its expiry as a double and the member, which ends with a zero byte. A number of -1 says that
--       there are too many, and nothing was changed

local key, known, subject, limit, length, most = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local version = -(call('ZSCORE', key, '#') or 0)

if subject then
  call('ZREMRANGEBYSCORE', key, '(0', now)
  local members = call('ZRANGE', key, '0', '-1')
  local before
  for _, member in ipairs(members) do
    if string.sub(member, 1, #subject) == subject then
      before = member
    end
  end
  if limit ~= '' and not before and #members > tonumber(most) then
    return pack('<ddd', now, version, -1)
  end
  version = math.max(now, version + 1)
  call('ZADD', key, -version, '#')
  if before then
    call('ZREM', key, before)
  end
  if limit ~= '' then
    call('ZADD', key, now + length, subject .. limit)
  end
  -- The version is kept for an hour after the last override, so that no caller takes an older one for this.
  local last = call('ZRANGE', key, '-1', '-1', 'WITHSCORES')
  call('PEXPIREAT', key, math.floor(math.max(now, last[2]) / 1000) + 3600000)
end

if version == tonumber(known) then
  return pack('<ddd', now, version, 0)
end
local members = call('ZRANGEBYSCORE', key, now + 1, '+inf', 'WITHSCORES')
local reply = { pack('<ddd', now, version, #members / 2) }
for i = 1, #members, 2 do
  reply[#reply + 1] = pack('<ds', tonumber(members[i + 1]), members[i])
end
return table.concat(reply)
