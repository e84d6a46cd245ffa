-- Sliding window log: a sorted set with a member for each admission, scored with its time. x is the window.
--
-- A member is `<time>`, or `<time>-<number>` for a further one of the same microsecond; `<time>:<weight>` if it weighs more; and
-- `<time>~<span>:<weight>` for several admissions, of which the first was so much earlier, or for charges beyond the limit. Of the
-- members of one time these are the last.
--
-- The first member, with a score of at most 0, says how the others are counted: `=`, each weighs 1; `#`, its score is minus their
-- weight. It stays when they have expired, since a key that is deleted cannot be created again on a node from which its slot is
-- moving.

local log = { read = false, add = false, give_back = false, wait = false, reset = false }

-- How many members the call may still read for the waits of denied charges, beside the first of each.
local reads = ALL_READS

local now_text = digits(now)

-- The time, the weight and the span of a member, which few have.
local function parts_of(member)
  local at = tonumber(member)
  if at then
    return at, 1
  end
  local text, span, weight = match(member, '^(%d+)~?(%d*):?(%d*)')
  return tonumber(text) or 0, tonumber(weight) or 1, tonumber(span)
end

local function weight_of(members)
  local total = 0
  for _, member in ipairs(members) do
    local _, weight = parts_of(member)
    total = total + weight
  end
  return total
end

-- The time of the member with this rank.
local function time_at(charge, rank)
  local at = parts_of(call('ZRANGE', charge.key, rank, rank)[1] or '')
  return at
end

-- Removes members, of which the first has this rank, and their weight.
local function remove(charge, members, rank)
  if #members == 0 then
    return
  end
  local weight = weight_of(members)
  call('ZREMRANGEBYRANK', charge.key, rank, rank + #members - 1)
  charge.total, charge.budget = max(0, charge.total - weight), charge.budget - #members
  if charge.header then
    call('ZINCRBY', charge.key, weight, '#')
  end
end

-- Reads a log whose members have weights.
local function read_weights(charge)
  local key = charge.key
  charge.stored, charge.header = false, call('ZSCORE', key, '#')
  charge.total = max(0, min(-(tonumber(charge.header or nil) or 0), EXACT - 1))
  if charge.header then
    local expired = call('ZRANGEBYSCORE', key, '(0', charge.til, 'LIMIT', '0', charge.budget - 2)
    remove(charge, expired, 1)
  end
end

-- Reads a log whose members weigh 1, of which `stored` are stored. What has expired is removed; of many, as many as a call may.
local function count(charge, stored)
  local key, til, most = charge.key, charge.til, charge.budget - 2
  local expired, removed = stored > most and call('ZCOUNT', key, '(0', til) or 0, nil
  if expired > most then
    removed = call('ZREMRANGEBYRANK', key, '1', most)
    charge.first = expired - removed + 1
  else
    removed = call('ZREMRANGEBYSCORE', key, '(0', til)
  end
  charge.stored, charge.header, charge.total = true, false, stored - removed - charge.first + 1
  charge.budget = charge.budget - removed
end

-- Removes what belongs to a clock that is gone: it is further ahead than a clock is set back in passing.
local function remove_gone(charge)
  local ahead = now + min(SLACK, charge.x)
  charge.newest = charge.total > 0 and time_at(charge, '-1') or now
  if charge.newest <= ahead then
    return
  end
  local most = max(0, charge.budget - 2)
  local gone = call('ZREVRANGEBYSCORE', charge.key, '+inf', '(' .. digits(ahead), 'LIMIT', '0', most)
  remove(charge, gone, -#gone)
  charge.newest = charge.total > 0 and time_at(charge, '-1') or now
end

-- What is read of any log.
local function room_of(charge, needed)
  if charge.quota - charge.total < needed then
    remove_gone(charge)
  end
  return max(0, charge.quota - charge.total)
end

function log.read(charge, needed)
  charge.first, charge.newest, charge.budget = 1, nil, BUDGET
  charge.til = charge.til or digits(now - charge.x)
  local stored = call('ZREVRANK', charge.key, '=')
  if stored then
    count(charge, stored)
  else
    read_weights(charge)
  end
  return room_of(charge, needed)
end

-- Adds members that weigh 1.
local function add_members(charge, number)
  local key, at = charge.key, now_text
  local left = number - call('ZADD', key, '0', '=', at, at) + (charge.stored and 0 or 1)
  local nth = charge.total
  while left > 0 do
    local members = {}
    for n = 1, left do
      nth = nth + 1
      members[2 * n - 1], members[2 * n] = at, at .. '-' .. nth
    end
    left = left - call('ZADD', key, unpack(members))
  end
  if charge.header then
    call('ZREM', key, '#')
  end
end

-- Adds weight, merged with the last member since the time `begin`; charges beyond the limit with others of them only.
local function merge(charge, weight, begin, is_beyond)
  local key, text, span = charge.key, now_text, is_beyond and 0 or nil
  weight = max(1, min(weight, MAX_TOTAL - charge.total))
  -- What has expired and is left counts until it is removed.
  charge.total, charge.first = charge.total + weight + charge.first - 1, 1
  local last = call('ZREVRANGEBYSCORE', key, text, digits(begin), 'LIMIT', '0', '1')[1]
  if last then
    local at, merged, since = parts_of(last)
    if since or not is_beyond then
      weight = weight + merged
      span = now - at + (since or 0)
      span = (is_beyond or since or span > 0) and span or nil
      call('ZREM', key, last)
    end
  end
  call('ZADD', key, '-' .. digits(charge.total), '#', text, text .. (span and '~' .. digits(span) or '') .. ':' .. digits(weight))
  if charge.stored then
    call('ZREM', key, '=')
  end
  charge.stored, charge.header, charge.newest = false, true, now
  charge.expires = charge.expires or expiry(now + charge.x)
  call('PEXPIREAT', key, charge.expires)
end

function log.add(charge, weight, number)
  local is_beyond = charge.total > 0 and charge.total >= charge.quota
  local are_alike = weight == number and number <= FEW and (charge.stored or charge.total == 0)
  if is_beyond or not are_alike then
    -- Of charges beyond the limit, those of a step are one member, so that a flood of them is few.
    return merge(charge, weight, is_beyond and now - now % ceil(charge.x / STEPS) or now, is_beyond)
  end
  add_members(charge, number)
  charge.total, charge.newest = charge.total + weight, now
  charge.expires = charge.expires or expiry(now + charge.x)
  call('PEXPIREAT', charge.key, charge.expires)
end

function log.wait(charge, cost)
  local window, need = charge.x, min(charge.total + cost - charge.quota, charge.total)
  if need <= 0 then
    return window
  end
  -- The time of the member whose expiry frees enough; of one beyond what a call may read, that of the last one read.
  local at, rank, size = now, charge.first, 8
  local bound = rank + (reads >= charge.budget and charge.budget - 1 or min(charge.budget - 1, 8))
  if charge.stored then
    at = time_at(charge, rank + need - 1)
  end
  while not charge.stored and need > 0 and rank < bound do
    local members = call('ZRANGE', charge.key, rank, min(rank + size, bound) - 1)
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
  return max(1, min(at + window - now, window + SLACK))
end

function log.reset(charge)
  if charge.total <= 0 then
    return 0
  end
  local newest = charge.newest or time_at(charge, '-1')
  return max(0, min(newest + charge.x - now, charge.x))
end

-- What only the driver needs.

-- Takes back weight that was added at the time `at` from members up to a time, and returns what is left to take.
local function take_back(charge, at, from, upto, left)
  local key, taken = charge.key, 0
  for _, member in ipairs(call('ZRANGEBYSCORE', key, digits(from), digits(upto), 'LIMIT', '0', charge.budget - 1)) do
    local time, weight, span = parts_of(member)
    local part = time - (span or 0) <= at and min(left, weight) or 0
    if part > 0 then
      call('ZREM', key, member)
      if weight > part then
        local text = digits(time)
        call('ZADD', key, text, text .. (span and '~' .. digits(span) or '') .. ':' .. digits(weight - part))
      end
      left, taken = left - part, taken + part
    end
  end
  if charge.header and taken > 0 then
    call('ZINCRBY', key, taken, '#')
  end
  return left
end

function log.give_back(charge, at, cost)
  if at > now - charge.x then
    local left, step = take_back(charge, at, at, at, cost), ceil(charge.x / STEPS)
    if left > 0 then
      take_back(charge, at, at + 1, at - at % step + step - 1, left)
    end
  end
end
