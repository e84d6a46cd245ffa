-- The members of logs: sorted sets with a member for each admission, scored with its time. x is the window.
--
-- A member is `<time>`, or `<time>-<number>` for a further one of the same microsecond; `<time>:<weight>` if it weighs more; and
-- `<time>~<span>:<weight>` for several admissions, of which the first was so much earlier, or for charges beyond the limit. Of the
-- members of one time these are the last.
--
-- The first member, with a score of at most 0, says how the others are counted: `=`, each weighs 1; `#`, its score is minus their
-- weight. It stays when they have expired, since a key that is deleted cannot be created again on a node from which its slot is
-- moving.
--
-- The state: the weight; the rank of the first member that counts; the header, or false; how many members may still be read; and the
-- time of the newest member, where it was read.

-- How many members the call may still read for the waits of denied charges, beside the first of each.
local reads = ALL_READS

local micros = time[2] .. ''
local now_text = time[1] .. string.sub('000000', #micros + 1) .. micros

-- The digits of a whole number. In two halves, which fit where a C long has 32 bits; `%.0f` takes half as long again.
local function digits(number)
  local low = number % 10000000
  if low == number then
    return string.format('%d', low)
  end
  return string.format('%d%07d', (number - low) / 10000000, low)
end

-- The time, the weight and the span of a member, which few have.
local function parts_of(member)
  -- Most members are a time, which has 16 digits until the year 2286.
  local at = #member == 16 and tonumber(member)
  if at then
    return at, 1
  end
  local text, span, weight = string.match(member, '^(%d+)~?(%d*):?(%d*)')
  if not text then
    return 0, 1
  end
  return text + 0, weight ~= '' and weight + 0 or 1, span ~= '' and span + 0 or nil
end

-- The time of the member with this rank.
local function time_at(key, rank)
  local at = parts_of(call('ZRANGE', key, rank, rank)[1] or '')
  return at
end

-- Removes members, of which the first has this rank. Returns the weight that is left, and how many members may still be read.
local function remove(key, members, rank, total, header, budget)
  local weight = 0
  for n = 1, #members do
    local _, part = parts_of(members[n])
    weight = weight + part
  end
  call('ZREMRANGEBYRANK', key, rank, rank + #members - 1)
  if header == '#' then
    call('ZINCRBY', key, weight, '#')
  end
  return math.max(0, total - weight), budget - #members
end

-- The room and the state. If the room is needed, this removes what belongs to a clock that is gone: it is further ahead than a clock is
-- set back in passing.
local function room_of(charge, needed, total, first, header, budget)
  local key, quota = charge.key, charge.quota
  if quota - total >= needed then
    return quota - total, total, first, header, budget
  end
  local ahead, newest = now + math.min(SLACK, charge.x), total > 0 and time_at(key, '-1') or now
  if newest > ahead then
    local gone = call('ZREVRANGEBYSCORE', key, '+inf', '(' .. digits(ahead), 'LIMIT', '0', math.max(0, budget - 2))
    if #gone > 0 then
      total, budget = remove(key, gone, -#gone, total, header, budget)
    end
    newest = total > 0 and time_at(key, '-1') or now
  end
  return math.max(0, quota - total), total, first, header, budget, newest
end

-- Reads a log whose members have weights.
local function read_weights(charge, needed)
  local key, total, budget = charge.key, 0, BUDGET
  local score = call('ZSCORE', key, '#')
  if score then
    charge.til = charge.til or digits(now - charge.x)
    local expired = call('ZRANGEBYSCORE', key, '(0', charge.til, 'LIMIT', '0', 'MOST_EXPIRED')
    total = -score
    total = total > 0 and (total < EXACT and total or EXACT - 1) or 0
    if #expired > 0 then
      total, budget = remove(key, expired, 1, total, '#', budget)
    end
  end
  return room_of(charge, needed, total, 1, score and '#', budget)
end

-- Adds weight, merged with the last member since the time `begin`; charges beyond the limit with others of them only.
local function merge(charge, weight, begin, is_beyond, total, first, header)
  local key, text, span, keeps = charge.key, now_text, is_beyond and 0 or nil, false
  if weight > MAX_TOTAL - total then
    weight = math.max(1, MAX_TOTAL - total)
  end
  -- What has expired and is left counts until it is removed.
  total = total + weight + first - 1
  local last = call('ZRANGE', key, '-1', '-1')[1] or ''
  local at, merged, since = parts_of(last)
  if at > now then
    last = call('ZREVRANGEBYSCORE', key, text, '(0', 'LIMIT', '0', '1')[1] or ''
    at, merged, since = parts_of(last)
  end
  if at >= begin and (since or not is_beyond) then
    weight = weight + merged
    local before = since or 0
    span = now - at + before
    -- The expiry was set when the first of them was added, and a second later at the latest.
    keeps = span - span % SLACK == before - before % SLACK
    span = (is_beyond or since or span > 0) and span or nil
    call('ZREM', key, last)
  end
  call('ZADD', key, -total, '#', text, text .. (span and '~' .. digits(span) or '') .. ':' .. digits(weight))
  if header == '=' then
    call('ZREM', key, '=')
  end
  if not keeps then
    charge.expires = charge.expires or digits(expiry(now + charge.x))
    call('PEXPIREAT', key, charge.expires)
  end
  return charge.x
end

-- The wait for the member whose expiry frees enough; for one beyond what a call may read, for that of the last one read.
local function log_wait(charge, cost, total, first, header, budget, newest)
  local key, window, wait = charge.key, charge.x, 0
  local need = cost and math.min(total + cost - charge.quota, total)
  if need and need <= 0 then
    wait = window
  elseif need then
    local at, rank, size = now, first, 8
    local bound = rank + (reads >= budget and budget - 1 or math.min(budget - 1, 8))
    if header == '=' then
      at, need = time_at(key, digits(rank + need - 1)), 0
    end
    while need > 0 and rank < bound do
      local members = call('ZRANGE', key, rank, math.min(rank + size, bound) - 1)
      for _, member in ipairs(members) do
        if need > 0 then
          local weight
          at, weight = parts_of(member)
          need = need - weight
        end
      end
      need = #members == size and need or 0
      rank, size, reads = rank + size, size * 8, reads - #members
    end
    wait = math.max(1, math.min(at + window - now, window + SLACK))
  end
  if total == 0 then
    return wait, 0
  end
  local reset = (newest or time_at(key, '-1')) + window - now
  return wait, reset > window and window or reset > 0 and reset or 0
end

-- What only the driver needs.

-- Takes back weight that was added at the time `at` from members up to a time, and returns what is left to take.
local function take_back(key, at, from, upto, left, header, budget)
  local taken = 0
  for _, member in ipairs(call('ZRANGEBYSCORE', key, digits(from), digits(upto), 'LIMIT', '0', budget - 1)) do
    local time, weight, span = parts_of(member)
    local part = time - (span or 0) <= at and math.min(left, weight) or 0
    if part > 0 then
      call('ZREM', key, member)
      if weight > part then
        local text = digits(time)
        call('ZADD', key, text, text .. (span and '~' .. digits(span) or '') .. ':' .. digits(weight - part))
      end
      left, taken = left - part, taken + part
    end
  end
  if header == '#' and taken > 0 then
    call('ZINCRBY', key, taken, '#')
  end
  return left
end
