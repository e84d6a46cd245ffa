-- Sliding window counter: when the current window began, what it has counted, and what the previous one had. The
-- previous window counts in proportion to how much of it the last window covers, in whole ticks, rounded up.

if algorithms.counter then
  local function limit()
    local quota, window, tick, cap = take(), take(), take(), take()

    return {
      algorithm = algorithms.counter,
      quota = quota,
      window = window,
      tick = tick,
      ticks = ceil(window / tick),
      cap = cap,
      opens = now - now % window,
      slack = min(SLACK, window),
    }
  end

  local function state()
    return { key = false, start = 0, current = 0, previous = 0 }
  end

  local function open(state, limit)
    local start, current, previous = fetch(state.key)
    local opens = limit.opens

    if not start or start + limit.window < opens or start > now + limit.slack then
      start, current, previous = opens, 0, 0
    elseif start < opens then
      start, current, previous = opens, 0, current
    elseif start <= now then
      start = opens
    end
    -- Otherwise in the next window: the clock was set back over the boundary.
    state.start, state.current, state.previous = start, current, previous
  end

  local function share(state, limit)
    if state.previous == 0 then
      return 0
    end
    local passed = floor(max(0, now - state.start) / limit.tick)
    return ceil(state.previous * max(0, limit.ticks - passed) / limit.ticks)
  end

  -- How long after the start of a window the share of the previous one has shrunk to `room`.
  local function shrinks(limit, previous, room)
    local passed = max(0, limit.ticks - floor(room * limit.ticks / max(1, previous)))
    return min(passed * limit.tick, limit.window)
  end

  local function write(state, limit)
    store(state.key, state.start + 2 * limit.window - now, state.start, state.current, state.previous)
  end

  local function room(state, limit)
    return max(0, limit.quota - state.current - share(state, limit))
  end

  local function add(state, limit, weight)
    state.current = min(state.current + weight, limit.cap)
    write(state, limit)
  end

  local function wait(state, limit, cost)
    keep(state.key, state.start + 2 * limit.window - now)

    local room = limit.quota - state.current - cost
    local at
    if room >= 0 then
      at = state.start + shrinks(limit, state.previous, room)
    else
      -- Not in this window: in the next one what counts now will be the previous.
      at = state.start + limit.window + shrinks(limit, state.current, max(0, limit.quota - cost))
    end
    return max(1, at - now)
  end

  local function reset(state, limit)
    if state.current > 0 then
      return state.start + 2 * limit.window - now
    end
    return state.previous > 0 and state.start + limit.window - now or 0
  end

  local function refund(state, limit, at, weight)
    if state.current + state.previous == 0 then
      return
    end

    if at >= state.start then
      state.current = max(0, state.current - weight)
    elseif at + limit.window >= state.start then
      state.previous = max(0, state.previous - weight)
    end
    write(state, limit)
  end

  algorithms.counter = {
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
