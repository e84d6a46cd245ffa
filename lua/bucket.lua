-- Token bucket, as in the generic cell rate algorithm: the time since which the bucket is not full, the tokens taken since then, and
-- the time of the last one. x tokens come in y microseconds, in lowest terms; z is the most that is stored, with which products are
-- exact.

-- How long it takes until this many tokens have come, rounded up. In two parts, so that no product leaves 2^53.
local function time_of(tokens, rate, period)
  local rest = period % rate
  local over = tokens * rest
  return tokens * ((period - rest) / rate) + (over + -over % rate) / rate
end

-- How many tokens come in this time.
local function tokens_in(span, rate, period)
  local count = span / period * rate + 0.5
  count = count - count % 1
  return time_of(count, rate, period) > span and count - 1 or count
end

-- What has come back is forgotten, and what was taken too far ahead of the clock: that belongs to a clock that is gone. The state: since
-- when the bucket is not full, the tokens taken since then, the time of the last one, the expiry, and when the bucket is full.
local function bucket_read(charge)
  local quota, value, expires = charge.quota, call('GET', charge.key), 0
  if value and #value == 32 then
    local rate, period = charge.x, charge.y
    local since, spent, at, kept_until = unpack_numbers('<dddd', value)
    expires = kept_until
    local full = since + (rate == 1 and spent * period or time_of(spent, rate, period))
    if
      full > now
      and since <= at
      and (at <= now or at <= now + math.min(SLACK, time_of(quota, rate, period)))
      and 0 < spent
      and spent <= charge.z
    then
      local room = quota - spent
      if since < now then
        room = room + (rate == 1 and (now - since - (now - since) % period) / period or tokens_in(now - since, rate, period))
      end
      return room > 0 and room or 0, since, spent, at, expires, full
    end
  end
  return quota, now, 0, now, expires, now
end

local function bucket_add(charge, weight, _, since, spent, at, expires)
  local rate, period, most = charge.x, charge.y, charge.z
  local total = spent + weight
  if total > most then
    -- Whole periods are settled before the numbers grow too large.
    local periods = math.floor(math.max(0, now - since) / period)
    since = since + periods * period
    total = math.min(math.max(0, spent - periods * rate) + weight, most)
  end
  at = at < now and now or at
  local full = since + (rate == 1 and total * period or time_of(total, rate, period))
  write(charge.key, since, total, at, expires, full)
  return full - now
end

local function bucket_wait(charge, cost, since, spent, _, _, full)
  local missing = cost and spent + cost - charge.quota
  if not missing then
    return 0, full - now
  end
  local wait = since + time_of(missing < spent and missing or spent, charge.x, charge.y) - now
  return wait > 1 and wait or 1, full - now
end

-- What only the driver needs.

-- How long it takes until this many tokens have come, rounded down.
local function time_rounded_down(tokens, rate, period)
  return time_of(tokens, rate, period) - (tokens * (period % rate) % rate > 0 and 1 or 0)
end

-- The time until a cost fits behind what is before it: each fill of the bucket beyond the first takes as long as the others.
local function bucket_wait_behind(charge, before, cost, since, spent)
  local quota, rate, period = charge.quota, charge.x, charge.y
  local missing = math.max(0, spent + before + cost - quota)
  local others = math.max(0, missing - 1)
  local fills = (others - others % quota) / quota
  return since + time_of(missing - fills * quota, rate, period) + fills * time_rounded_down(quota, rate, period) - now
end

-- If nothing was taken after these tokens, they are all that are missing. Else those that came since then may all have been theirs, first
-- of what stays of them; one of which a part has come is not given back, and comes when it would have come.
local function bucket_give_back(charge, at, cost, since, spent, last, expires)
  local rate, period = charge.x, charge.y
  local kept = time_rounded_down(math.min(charge.kept, charge.z), rate, period)
  local span = at < last and math.max(0, now - at - kept) or 0
  local come = tokens_in(span, rate, period)
  if spent == 0 or at < since or cost <= come then
    return
  end
  if time_rounded_down(come, rate, period) < span then
    come = come + 1
  end
  since = math.max(0, since - (time_rounded_down(come, rate, period) - span))
  spent = math.max(0, spent - (cost - come))
  local full = since + time_of(spent, rate, period)
  -- A bucket that is full is full also for a clock that goes back.
  write(charge.key, since, full > now and spent or 0, last, expires, math.max(now, full))
end
