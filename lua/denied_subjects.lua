-- Counts how often subjects of a policy are denied by all processes, with the algorithm Space-Saving, and reads the counts.
--
-- KEYS  a sorted set: a member for each subject, scored with its denials; and with negative scores `#since`, the time of the first
--       one, `#total`, all denials, and `#unlisted`, the most that processes have not sent of one subject
-- ARGV  how many subjects to return, and how many the set keeps; to count also for how many milliseconds it is kept, the
--       denials, the most that are not sent of a subject, and for each subject itself and its denials
-- reply one string: as little-endian doubles when the first denial was (0 without any), all denials, the most of a subject that
--       the set does not keep, those not sent, and the number of subjects; then for each its denials as a double and the
--       member, which ends with a zero byte

local replicate_commands = redis.replicate_commands
if replicate_commands then
  replicate_commands()
end

local call, pack = redis.call, struct.pack
local key, returned, most, lasts, total, unlisted = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]

-- A whole number as text.
local function text(number)
  return string.format('%.0f', number)
end

-- The denials of the subject that has the fewest, and its member, if the set is full.
local function fewest()
  if call('ZCOUNT', key, '(0', '+inf') < most then
    return 0
  end
  local last = call('ZRANGEBYSCORE', key, '(0', '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
  return tonumber(last[2]), last[1]
end

-- A number of all subjects.
local function header(member)
  return -(tonumber(call('ZSCORE', key, member) or '0'))
end

if lasts then
  local time = call('TIME')
  local now = time[1] * 1000000 + time[2]
  if header('#since') == 0 then
    call('ZADD', key, text(-now), '#since')
  end
  call('ZINCRBY', key, '-' .. total, '#total')
  call('ZINCRBY', key, '-' .. unlisted, '#unlisted')
  for i = 6, #ARGV, 2 do
    local subject, denials = ARGV[i], ARGV[i + 1]
    if not call('ZSCORE', key, subject) then
      local inherited, replaced = fewest()
      if replaced then
        call('ZREM', key, replaced)
        denials = text(denials + inherited)
      end
    end
    call('ZINCRBY', key, denials, subject)
  end
  call('PEXPIREAT', key, text(math.floor(now / 1000) + lasts))
end

local subjects = call('ZREVRANGEBYSCORE', key, '+inf', '(0', 'WITHSCORES', 'LIMIT', '0', returned)
local kept = fewest()
local reply = { pack('<ddddd', header('#since'), header('#total'), kept, header('#unlisted'), #subjects / 2) }
for i = 1, #subjects, 2 do
  reply[#reply + 1] = pack('<ds', tonumber(subjects[i + 1]), subjects[i])
end
return table.concat(reply)
