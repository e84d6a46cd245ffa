-- Token bucket, as the generic cell rate algorithm reckons it: since when the bucket is not full, how many tokens were
-- taken since then, and when the last was. `rate` tokens come in `period` microseconds, in lowest terms.

if algorithms.bucket then
  -- How long it takes until this many tokens have come, rounded up. Split so that no product leaves 2^53.
  local function time(limit, tokens)
    return tokens * limit.whole + ceil(tokens * limit.rest / limit.rate)
  end

  local function limit()
    local quota, rate, period, cap = take(), take(), take(), take()

    local limit = {
      algorithm = algorithms.bucket,
      quota = quota,
      rate = rate,
      period = period,
      cap = cap,
      whole = floor(period / rate),
      rest = period % rate,
      slack = 0,
    }
    limit.slack = min(SLACK, time(limit, quota))
    return limit
  end

  -- How many tokens come in this time.
  local function tokens(limit, span)
    local periods = floor(span / limit.period)
    if limit.rate == 1 then
      return periods
    end
    local rest = span - periods * limit.period

    local count = floor(rest / limit.period * limit.rate)
    while time(limit, count + 1) <= rest do
      count = count + 1
    end
    while count > 0 and time(limit, count) > rest do
      count = count - 1
    end
    return periods * limit.rate + count
  end

  local function passed(state)
    return max(0, now - state.since)
  end

  -- Forgets what has come back, and what was taken too far ahead of the clock: that belongs to a clock that is gone.
  local function settle(state, limit)
    state.full = state.since + time(limit, state.spent)
    if state.at > now + limit.slack or state.full <= max(now, state.since) then
      state.since, state.spent, state.at, state.full = now, 0, now, now
    end
  end

  local function state()
    return { key = false, since = 0, spent = 0, at = 0, full = 0 }
  end

  local function open(state, limit)
    local since, spent, at = fetch(state.key)
    state.since, state.spent, state.at = since or now, min(spent or 0, limit.cap), at or now
    settle(state, limit)
  end

  local function room(state, limit)
    return max(0, limit.quota - state.spent + tokens(limit, passed(state)))
  end

  local function write(state)
    store(state.key, max(0, state.full - now), state.since, state.spent, max(state.at, now))
  end

  local function add(state, limit, weight)
    -- Whole periods are settled before the numbers grow too large.
    if state.spent + weight > limit.cap then
      local periods = floor(passed(state) / limit.period)
      state.since = state.since + periods * limit.period
      state.spent = max(0, state.spent - periods * limit.rate)
    end
    state.spent = min(state.spent + weight, limit.cap)
    state.full = state.since + time(limit, state.spent)
    write(state)
  end

  local function wait(state, limit, cost)
    keep(state.key, max(0, state.full - now))
    local missing = max(0, state.spent + cost - limit.quota)
    return max(1, state.since + time(limit, missing) - now)
  end

  local function reset(state)
    return max(0, state.full - now)
  end

  local function refund(state, limit, at, weight)
    if state.spent > 0 and at >= state.since then
      state.spent = max(0, state.spent - weight)
      settle(state, limit)
      write(state)
    end
  end

  algorithms.bucket = {
    limit = limit,
    state = state,
    open = open,
    room = room,
    add = add,
    wait = wait,
    reset = reset,
    refund = refund,
  }
end
