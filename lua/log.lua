-- Sliding window log: a sorted set with a member for each admission, scored with its time. x is the window.
--
-- A member is `<time>`, or `<time>-<number>` for a further one of the same microsecond; `<time>:<weight>` if it weighs more; and
-- `<time>~<span>:<weight>` for charges beyond the limit, of which the first was so much earlier. Of the members of one time these are
-- the last.
--
-- The first member, with a score of at most 0, says how the others are counted: `=`, each weighs 1; `#`, its score is minus their
-- weight. It stays when they have expired, since a key that is deleted cannot be created again on a node from which its slot is
-- moving.
--
-- The state: the weight; the rank of the first member that counts; the header, or nil; how many members may still be read; and the
-- time of the newest member, where it was read.

-- How many members the call may still read for the waits of denied charges, beside the first of each.
local reads = ALL_READS

-- By window, the time up to which members have expired, and the expiry of a key.
local expired_at, expiries = {}, {}

local micros = time[2] .. ''
local now_text = time[1] .. (#micros == 6 and micros or string.sub('00000' .. micros, -6))

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
  return (parts_of(call('ZRANGE', key, rank, rank)[1] or ''))
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

local function log_read(charge, needed)
  local key, quota, total, first, budget = charge.key, charge.quota, 0, 1, BUDGET
  local stored, header, newest = call('ZREVRANK', key, '='), '=', nil
  local score = not stored and call('ZSCORE', key, '#')
  local til = expired_at[charge.x]
  if not til then
    til = digits(now - charge.x)
    expired_at[charge.x] = til
  end
  if stored then
    -- What has expired is removed; of many, as many as a call may.
    local expired, removed = stored > MOST_EXPIRED and call('ZCOUNT', key, '(0', til) or 0, nil
    if expired > MOST_EXPIRED then
      removed = call('ZREMRANGEBYRANK', key, '1', 'MOST_EXPIRED')
      first = expired - removed + 1
    else
      removed = call('ZREMRANGEBYSCORE', key, '(0', til)
    end
    total, budget = stored - removed - first + 1, BUDGET - removed
  elseif score then
    header, total = '#', math.max(0, math.min(-score, EXACT - 1))
    local expired = call('ZRANGEBYSCORE', key, '(0', til, 'LIMIT', '0', 'MOST_EXPIRED')
    if #expired > 0 then
      total, budget = remove(key, expired, 1, total, '#', budget)
    end
  else
    header = nil
  end
  if total + needed > quota then
    -- What is further ahead than a clock is set back in passing belongs to a clock that is gone.
    newest = total > 0 and time_at(key, '-1') or now
    local ahead = newest > now and now + math.min(SLACK, charge.x)
    if ahead and newest > ahead then
      local gone = call('ZREVRANGEBYSCORE', key, '+inf', '(' .. digits(ahead), 'LIMIT', '0', math.max(0, budget - 2))
      if #gone > 0 then
        total, budget = remove(key, gone, -#gone, total, header, budget)
      end
      newest = total > 0 and time_at(key, '-1') or now
    end
  end
  return total < quota and quota - total or 0, total, first, header, budget, newest
end

local function log_add(charge, weight, count, total, first, header)
  local key, at, keeps = charge.key, now_text, false
  local is_beyond = total > 0 and total >= charge.quota
  if not is_beyond and weight == count and count <= FEW and (header == '=' or total == 0) then
    local left, nth = count - (header == '=' and call('ZADD', key, at, at) or call('ZADD', key, '0', '=', at, at) - 1), total
    while left > 0 do
      local members = {}
      for n = 1, left do
        nth = nth + 1
        members[2 * n - 1], members[2 * n] = at, at .. '-' .. nth
      end
      left = left - call('ZADD', key, unpack(members))
    end
    if header == '#' then
      call('ZREM', key, '#')
    end
  else
    -- Merged with the last member of this time; of charges beyond the limit, those of a step are one member, so that a flood of them
    -- is few.
    local begin, span = is_beyond and now - now % math.ceil(charge.x / STEPS) or now, is_beyond and 0 or nil
    weight = math.max(1, math.min(weight, MAX_TOTAL - total))
    -- What has expired and is left counts until it is removed.
    total = total + weight + first - 1
    local last = call('ZRANGE', key, '-1', '-1')[1] or ''
    local merged_at, merged, since = parts_of(last)
    if merged_at > now then
      last = call('ZREVRANGEBYSCORE', key, at, '(0', 'LIMIT', '0', '1')[1] or ''
      merged_at, merged, since = parts_of(last)
    end
    if merged_at >= begin and (since or not is_beyond) then
      local before = since or 0
      weight, span = weight + merged, now - merged_at + before
      -- The expiry was set when the first of them was added, and a second later at the latest.
      keeps = span - span % SLACK == before - before % SLACK
      span = (is_beyond or since or span > 0) and span or nil
      call('ZREM', key, last)
    end
    call('ZADD', key, -total, '#', at, at .. (span and '~' .. digits(span) or '') .. ':' .. digits(weight))
    if header == '=' then
      call('ZREM', key, '=')
    end
  end
  if not keeps then
    local expires = expiries[charge.x]
    if not expires then
      expires = digits(expiry(now + charge.x))
      expiries[charge.x] = expires
    end
    call('PEXPIREAT', key, expires)
  end
  return charge.x
end

-- The wait until enough members have expired; where that is beyond what a call may read, until the last one read has.
local function log_wait(charge, cost, total, first, header, budget, newest)
  local key, window, wait = charge.key, charge.x, 0
  local need = cost and total + cost - charge.quota
  if need and total == 0 then
    wait = window
  elseif need and need <= 0 then
    -- More has expired since the requests were judged.
    wait = 1
  elseif need then
    need = need < total and need or total
    local at = now
    if header == '=' then
      at = time_at(key, digits(first + need - 1))
    else
      local rank, size, bound = first, 8, first + (reads >= budget and budget - 1 or math.min(budget - 1, 8))
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
    end
    wait = at + window - now
    wait = wait < 1 and 1 or wait < window + SLACK and wait or window + SLACK
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

local function log_give_back(charge, at, cost, _, _, header, budget)
  if at > now - charge.x then
    local left, step = take_back(charge.key, at, at, at, cost, header, budget), math.ceil(charge.x / STEPS)
    if left > 0 then
      take_back(charge.key, at, at + 1, at - at % step + step - 1, left, header, budget)
    end
  end
end
