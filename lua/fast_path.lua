-- The fast path. Most requests are checks of one charge that fits, on a key as this script leaves it; of those that do not
-- fit, most are of one caller on a log. They are decided here, with the same result as the general path, before a function is
-- made for that. In all other cases nothing is added and the request takes the general path, and so do errors. A fast path
-- returns what remains, the time to a full reset and, if the check does not fit, the wait; or nothing.

-- So many callers of one check are a member each, as they would be one by one. More are one member, and a log that holds
-- such a one takes longer to read.
local FEW = 32
-- How many expired members of a log one check removes.
local MOST = BOUND - ENDS - 2
-- Scores and names of that many.
local members

-- A check of cost 1 of a log of exact times. All of its members weigh 1, unless there is a `#` at rank 0.
local function log_check(key, times, quota, window, expires)
  if times > FEW or times > quota then
    return
  end
  local stored, first, held = call('ZCARD', key), nil, 0
  if stored > 0 then
    first = tonumber(call('ZRANGE', key, '0', '0')[1])
    if not first then
      return
    end
    if first <= now - window then
      if stored > MOST and call('ZCOUNT', key, '(0', text(now - window)) > MOST then
        return
      end
      -- The new member first: a key that loses its last member cannot be created again on a node from which its slot is
      -- moving.
      held = call('ZADD', key, now_text, now_text)
      if held == 0 then
        return
      end
      stored, first = stored - call('ZREMRANGEBYSCORE', key, '(0', text(now - window)), nil
    end
  end

  if stored + times > quota then
    if held > 0 then
      call('ZREM', key, now_text)
    end
    if times > 1 then
      return
    end
    local newest = tonumber(string.match(call('ZRANGE', key, '-1', '-1')[1], '^%d+'))
    if newest > now + min(SLACK, window) then
      return
    end
    local rank = stored - quota
    if rank > 0 or not first then
      first = tonumber(string.match(call('ZRANGE', key, rank, rank)[1], '^%d+'))
    end
    if call('PTTL', key) == -1 then
      call('PEXPIREAT', key, expires)
    end
    return 0, min(window, newest + window - now), max(1, first + window - now)
  end

  if times == 1 then
    if held == 0 and call('ZADD', key, now_text, now_text) == 0 then
      return
    end
  else
    if not members then
      members = { now_text, now_text }
      for i = 2, FEW do
        members[2 * i - 1], members[2 * i] = now_text, now_text .. '-' .. i
      end
    end
    -- A member of that name has that score, so adding it again changes nothing. Each attempt has another name, and there
    -- are no more than `stored` to meet.
    local missing, attempt = times - held - call('ZADD', key, unpack(members, 1, 2 * times)), max(stored, FEW)
    while missing > 0 do
      attempt = attempt + 1
      missing = missing - call('ZADD', key, now_text, now_text .. '-' .. attempt)
    end
  end
  call('PEXPIREAT', key, expires)
  return quota - stored - times, window
end

-- The most frequent check, alone in its call.
local lone_quota, lone_window
if ARGV[1] == 'check 1 1 1' and #ARGV == 2 then
  lone_quota, lone_window = string.match(ARGV[2], '^log 1 (%d+) (%d+) 0$')
end
if lone_quota then
  local window = lone_window + 0
  local fine, remaining, reset, wait = pcall(log_check, KEYS[1], 1, lone_quota + 0, window, expiry(now + window))
  if fine and remaining then
    return pack('<ddddd', now, wait and 0 or 1, remaining, wait or 0, reset)
  end
end

-- What a key of numbers holds: three, and until when it does; zeros if there is none, nothing if it holds anything else.
-- They are little-endian doubles: to read and write them as text costs more than the decision.
local function read(key)
  local value = call('GET', key)
  if not value then
    return 0, 0, 0, 0
  end
  if #value == 32 then
    return struct.unpack('<dddd', value)
  end
end

-- Writes them to a key that matters `til` then. An expiry that will do is left alone: to set one costs as much as all
-- else.
local function write(key, a, b, c, expires, til)
  if til <= expires and expires <= til + SLACK then
    call('SETRANGE', key, '0', pack('<dddd', a, b, c, expires))
  else
    expires = til + SLACK - (til + SLACK) % 1000
    call('SET', key, pack('<dddd', a, b, c, expires), 'PXAT', expiry(til))
  end
end

-- The fast path for a charge, if it has one.
local function plain(argument)
  local algorithm, cost, quota, x, y, z = string.match(argument, '^(%a+) (%d+) (%d+) (%d+) (%d+) ?(%d*)$')
  if not algorithm then
    return
  end
  cost, quota, x, y = cost + 0, quota + 0, x + 0, y + 0

  if algorithm == 'log' and cost == 1 and y == 0 then
    local expires = expiry(now + x)
    return function(key, times)
      return log_check(key, times, quota, x, expires)
    end
  end

  if algorithm == 'bucket' and x == 1 then
    local period, most = y, z + 0
    return function(key, times)
      local weight = cost * times
      local since, spent, at, expires = read(key)
      if not since or not (0 <= since and since <= now and 0 <= spent and spent + weight <= most and at <= now) then
        return
      end
      local full = since + spent * period
      if full <= now then
        since, spent, full = now, 0, now
      end
      local span = now - since
      local room = quota - spent + (span - span % period) / period
      if room >= weight then
        full = full + weight * period
        write(key, since, spent + weight, now, expires, full)
        return room - weight, full - now
      end
    end
  end

  if algorithm == 'counter' then
    local window, tick, most = x, y, z + 0
    local ticks, opens = ceil(window / tick), now - now % window
    local left, til = ticks - floor((now - opens) / tick), opens + 2 * window
    return function(key, times)
      local weight = cost * times
      local start, current, previous, expires = read(key)
      if not start or not (start <= opens) then
        return
      elseif start < opens then
        current, previous = 0, start + window >= opens and current or 0
      end
      if not (0 <= current and current + weight <= most and 0 <= previous and previous <= most) then
        return
      end
      local share = previous * left
      local room = quota - current - (share + -share % ticks) / ticks
      if room >= weight then
        write(key, opens, current + weight, previous, expires, til)
        return room - weight, til - now
      end
    end
  end

  if algorithm == 'fixed' then
    local window, anchored = x, y == 1
    local opens = anchored and now or now - now % window
    return function(key, times)
      local weight = cost * times
      local start, used, _, expires = read(key)
      if not start or not (0 <= start and start <= now and 0 <= used and used + weight <= MAX_TOTAL) then
        return
      end
      if used == 0 or start + window <= now or start < opens and not anchored then
        start, used = opens, 0
      end
      local room, finish = quota - used, (anchored and start or opens) + window
      if room >= weight then
        write(key, start, used + weight, 0, expires, finish)
        return room - weight, finish - now
      end
    end
  end
end

local reply, length = { pack('<d', now) }, 1
-- How many keys belong to requests that were decided.
local passed = 0

-- Decides a call of one run, as far as the fast path applies, and returns whether that was all. A call of several runs is left
-- to the driver, which reads all of them first: where a calendar does not fit, nothing may have been done.
local function hurry()
  if #ARGV ~= 2 then
    return
  end
  local requests, times = string.match(ARGV[1], '^check (%d+) ([%d,]+) 1$')
  local check = requests and plain(ARGV[2])
  if not check then
    return
  end
  requests = requests + 0
  -- How many callers each of them has: one number for all, or a list.
  local all = tonumber(times)
  local each = not all and string.gmatch(times, '%d+')
  while passed < requests do
    times = all or tonumber(each())
    local remaining, reset, wait = check(KEYS[passed + 1], times)
    if not remaining then
      return
    end
    passed, length = passed + 1, length + 1
    reply[length] = pack('<dddd', wait and 0 or times, remaining, wait or 0, reset)
  end
  return true
end

if not lone_quota then
  local fine, done = pcall(hurry)
  if fine and done then
    return table.concat(reply)
  end
end
