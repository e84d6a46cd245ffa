-- Token bucket, as in the generic cell rate algorithm: the time since which the bucket is not full, the tokens taken since then, and
-- the time of the last one. x tokens come in y microseconds, in lowest terms; z is the most that is stored, with which products are
-- exact.

-- How long it takes until this many tokens have come, rounded up. Split so that no product leaves 2^53.
local function time_of(tokens, rate, period)
  if rate == 1 then
    return tokens * period
  end
  local over = tokens * (period % rate)
  return tokens * ((period - period % rate) / rate) + (over + -over % rate) / rate
end

-- How many tokens come in this time.
local function tokens_in(span, rate, period)
  local left = span % period
  local periods = (span - left) / period
  if rate == 1 then
    return periods
  end

  local count = math.floor(left / period * rate)
  while time_of(count + 1, rate, period) <= left do
    count = count + 1
  end
  while count > 0 and time_of(count, rate, period) > left do
    count = count - 1
  end
  return periods * rate + count
end

-- Forgets what has come back, and what was taken too far ahead of the clock: that belongs to a clock that is gone. Returns the state:
-- since when the bucket is not full, the tokens taken since then, the time of the last one, the expiry, and when the bucket is full.
local function settled(charge, since, spent, at, expires)
  local full = since + time_of(spent, charge.x, charge.y)
  if full <= now or spent == 0 or at > now and at > now + math.min(SLACK, time_of(charge.quota, charge.x, charge.y)) then
    return now, 0, now, expires, now
  end
  return since, spent, at, expires, full
end

local function bucket_read(charge)
  local since, spent, at, expires, full = fetch(charge.key)
  since, spent, at, expires, full = settled(charge, since, spent < charge.z and spent or charge.z, at, expires)
  local room = charge.quota - spent
  if since < now then
    room = room + tokens_in(now - since, charge.x, charge.y)
  end
  return room > 0 and room or 0, since, spent, at, expires, full
end

local function bucket_add(charge, weight, _, since, spent, at, expires)
  local rate, period = charge.x, charge.y
  local total = spent + weight
  if total > charge.z then
    -- Whole periods are settled before the numbers grow too large.
    local periods = math.floor(math.max(0, now - since) / period)
    since = since + periods * period
    total = math.min(math.max(0, spent - periods * rate) + weight, charge.z)
  end
  at = at < now and now or at
  local full = since + time_of(total, rate, period)
  write(charge.key, since, total, at, expires, full)
  return since, total, at, expires, full
end

local function bucket_wait(charge, cost, since, spent, _, _, full)
  local wait = 0
  if cost then
    local missing = math.min(spent, math.max(0, spent + cost - charge.quota))
    wait = math.max(1, since + time_of(missing, charge.x, charge.y) - now)
  end
  return wait, full > now and full - now or 0
end

-- What only the driver needs.

-- How long it takes until this many tokens have come, rounded down.
local function time_rounded_down(tokens, rate, period)
  return time_of(tokens, rate, period) - (tokens * (period % rate) % rate > 0 and 1 or 0)
end

-- If nothing was taken after these tokens, they are all that are missing. Else those that came since then may all have been theirs;
-- one of which a part has come is not given back, and comes when it would have come.
local function bucket_give_back(charge, at, cost, since, spent, last, expires)
  local rate, period = charge.x, charge.y
  local span = at < last and math.max(0, now - at) or 0
  local come = tokens_in(span, rate, period)
  if spent == 0 or at < since or cost <= come then
    return
  end
  if time_rounded_down(come, rate, period) < span then
    come = come + 1
  end
  since = math.max(0, since - (time_rounded_down(come, rate, period) - span))
  write(charge.key, settled(charge, since, math.max(0, spent - (cost - come)), last, expires))
end
