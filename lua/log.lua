-- Sliding window log: a sorted set whose members weigh 1 as long as each request costs 1, and there are few at once.

local function log_read(charge, needed)
  local key = charge.key
  local stored = call('ZREVRANK', key, '=')
  if not stored then
    return read_weights(charge, needed)
  end
  -- What has expired is removed; of many, as many as a call may.
  charge.til = charge.til or digits(now - charge.x)
  local first, removed = 1, nil
  local expired = stored > MOST_EXPIRED and call('ZCOUNT', key, '(0', charge.til) or 0
  if expired > MOST_EXPIRED then
    removed = call('ZREMRANGEBYRANK', key, '1', 'MOST_EXPIRED')
    first = expired - removed + 1
  else
    removed = call('ZREMRANGEBYSCORE', key, '(0', charge.til)
  end
  return room_of(charge, needed, stored - removed - first + 1, first, '=', BUDGET - removed)
end

local function log_add(charge, weight, count, total, first, header)
  local key, at = charge.key, now_text
  local is_beyond = total > 0 and total >= charge.quota
  local are_alike = weight == count and count <= FEW and (header == '=' or total == 0)
  if is_beyond or not are_alike then
    -- Of charges beyond the limit, those of a step are one member, so that a flood of them is few.
    local begin = is_beyond and now - now % math.ceil(charge.x / STEPS) or now
    return merge(charge, weight, begin, is_beyond, total, first, header)
  end

  local left = count - (header == '=' and call('ZADD', key, at, at) or call('ZADD', key, '0', '=', at, at) - 1)
  local nth = total
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
  charge.expires = charge.expires or digits(expiry(now + charge.x))
  call('PEXPIREAT', key, charge.expires)
  return charge.x
end

-- What only the driver needs.

local function log_give_back(charge, at, cost, _, _, header, budget)
  if at > now - charge.x then
    local left, step = take_back(charge.key, at, at, at, cost, header, budget), math.ceil(charge.x / STEPS)
    if left > 0 then
      take_back(charge.key, at, at + 1, at - at % step + step - 1, left, header, budget)
    end
  end
end
