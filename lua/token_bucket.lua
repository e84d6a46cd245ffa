-- Token bucket, as in the generic cell rate algorithm: the time since which the bucket is not full, the tokens taken since
-- then, and the time of the last one. `rate` tokens come in `period` microseconds, in lowest terms.

if token_bucket then
  -- How long it takes until this many tokens have come, rounded up. Split so that no product leaves 2^53.
  local function time(tokens, rate, period)
    local over = tokens * (period % rate)
    return tokens * ((period - period % rate) / rate) + (over + -over % rate) / rate
  end

  -- How many tokens come in this time.
  local function tokens(span, rate, period)
    local left = span % period
    local periods = (span - left) / period
    if rate == 1 then
      return periods
    end

    local count = math.floor(left / period * rate)
    while time(count + 1, rate, period) <= left do
      count = count + 1
    end
    while count > 0 and time(count, rate, period) > left do
      count = count - 1
    end
    return periods * rate + count
  end

  -- Time until the cost fits, at least 1.
  local function wait(cost, quota, since, spent, rate, period)
    local missing = math.min(spent, math.max(0, spent + cost - quota))
    return math.max(1, since + time(missing, rate, period) - now)
  end

  local refund
  if rest then
    -- How long it takes until this many tokens have come, rounded down.
    local function time_rounded_down(tokens, rate, period)
      return time(tokens, rate, period) - (tokens * (period % rate) % rate > 0 and 1 or 0)
    end

    -- Gives tokens back that have not come back already, and returns whether there are any.
    --
    -- If nothing was taken after them, these are all that are missing. Else, those that came since then may all have been theirs;
    -- one of which a part has come is not given back, and comes when it would have come.
    function refund(key, refunded_at, cost, since, spent, at, expires, rate, period)
      if spent == 0 or refunded_at < since then
        return false
      end
      local span = refunded_at < at and math.max(0, now - refunded_at) or 0
      local come = tokens(span, rate, period)
      if cost <= come then
        return false
      end
      if time_rounded_down(come, rate, period) < span then
        come = come + 1
      end
      since = math.max(0, since - (time_rounded_down(come, rate, period) - span))
      spent = math.max(0, spent - (cost - come))
      local full = since + time(spent, rate, period)
      if full <= now or spent == 0 then
        since, spent, at, full = now, 0, now, now
      end
      write(key, since, spent, at, expires, full)
      return true
    end
  end

  -- Decides a charge of a token bucket.
  function token_bucket(key, times, rest, cost, quota, rate, period, cap, request)
    local since, spent, at, expires = fetch(key)
    spent = spent < cap and spent or cap
    -- Forgets what has come back, and what was taken too far ahead of the clock: that belongs to a clock that is gone.
    local full = since + (rate == 1 and spent * period or time(spent, rate, period))
    if full <= now or spent == 0 or at > now and at > now + math.min(SLACK, time(quota, rate, period)) then
      since, spent, at, full = now, 0, now, now
    end

    local room, counted = quota - spent, times
    if since < now then
      room = room + tokens(now - since, rate, period)
    end
    if room < times * cost then
      room = room < 0 and 0 or room
      counted = (room - room % cost) / cost
    end
    local waits, refunded_at = counted < times, nil
    if rest then
      counted, waits, refunded_at = rest(request, room, counted, cost, quota)
    end

    if refunded_at and refund(key, refunded_at, cost, since, spent, at, expires, rate, period) then
      return token_bucket(key, 0, nil, cost, quota, rate, period, cap)
    elseif counted > 0 then
      local weight = counted * cost
      spent = spent + weight
      if spent > cap then
        -- Whole periods are settled before the numbers grow too large.
        local periods = math.floor(math.max(0, now - since) / period)
        since = since + periods * period
        spent = math.min(math.max(0, spent - weight - periods * rate) + weight, cap)
      end
      at = at < now and now or at
      full = since + (rate == 1 and spent * period or time(spent, rate, period))
      write(key, since, spent, at, expires, full)
      room = room > weight and room - weight or 0
      if not waits then
        return counted, room, 0, full - now
      end
    elseif waits then
      keep(key, full)
    end
    return counted, room, waits and wait(cost, quota, since, spent, rate, period) or 0, full > now and full - now or 0
  end
end
