-- Token bucket, as the generic cell rate algorithm computes it: since when the bucket is not full, how many tokens were
-- taken since then, and when the last was. `rate` tokens come in `period` microseconds, in lowest terms.

function algorithms.bucket(cost, quota, rate, period, cap)
  local whole, rest = floor(period / rate), period % rate
  local key, since, spent, at, full, expires

  -- How long it takes until this many tokens have come, rounded up. Split so that no product leaves 2^53.
  local function time(tokens)
    local over = tokens * rest
    return tokens * whole + (over + -over % rate) / rate
  end

  local slack = min(SLACK, time(quota))

  -- How many tokens come in this time.
  local function come(span)
    local left = span % period
    local periods = (span - left) / period
    if rate == 1 then
      return periods
    end

    local count = floor(left / period * rate)
    while time(count + 1) <= left do
      count = count + 1
    end
    while count > 0 and time(count) > left do
      count = count - 1
    end
    return periods * rate + count
  end

  -- Forgets what has come back, and what was taken too far ahead of the clock: that belongs to a clock that is gone.
  local function settle()
    full = since + time(spent)
    if at > now + slack or full <= max(now, since) then
      since, spent, at, full = now, 0, now, now
    end
  end

  local function room()
    return max(0, quota - spent + come(max(0, now - since)))
  end

  local function save()
    write(key, since, spent, at, expires, max(full, now))
  end

  local charge = { cost = cost, quota = quota }

  function charge.open(name)
    key = name
    since, spent, at, expires = fetch(key)
    spent = min(spent, cap)
    settle()
    return room()
  end

  function charge.add(weight)
    -- Whole periods are settled before the numbers grow too large.
    if spent + weight > cap then
      local periods = floor(max(0, now - since) / period)
      since = since + periods * period
      spent = max(0, spent - periods * rate)
    end
    spent = min(spent + weight, cap)
    at = max(at, now)
    full = since + time(spent)
    save()
  end

  function charge.wait()
    keep(key, full)
    return max(1, since + time(min(spent, max(0, spent + cost - quota))) - now)
  end

  function charge.reset()
    return max(0, full - now)
  end

  if not refunding then
    return charge
  end

  -- Gives tokens back that have not come back already. If nothing was taken after them, these are all that are missing.
  -- Else, those that came since then may all have been theirs: they are given back no second time, nor is the time in which
  -- the next comes.
  function charge.refund(admitted_at, weight)
    local count, left = 0, 0
    if admitted_at < at then
      local span = max(0, now - admitted_at)
      count = come(span)
      -- Rounded up, where the last token came within a microsecond.
      local rest_of = count % rate
      left = span - (count - rest_of) / rate * period - time(rest_of) + (rest_of * rest % rate > 0 and 1 or 0)
    end
    if spent > 0 and weight > count and admitted_at >= since then
      spent = max(0, spent - (weight - count))
      since = since + left
      settle()
      save()
    end
    return room()
  end

  return charge
end
