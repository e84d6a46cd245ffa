-- Fixed window: when the open window began, and what was used of it.

if algorithms.fixed then
  -- Anchored windows begin with the first request, aligned ones at multiples of their length, and those of a calendar
  -- at boundaries that come with the call, some around the time that the caller guessed.
  local function limit()
    local quota, window, anchored, boundaries = take(), take(), take() == 1, take()

    local opens, closes
    if boundaries > 0 then
      local from, upto = take()
      for _ = 2, boundaries do
        upto = take()
        if from <= now and now < upto then
          opens, closes = from, upto
        end
        from = upto
      end
      outside_calendar = outside_calendar or not opens
    else
      opens = anchored and now or now - now % window
      closes = opens + window
    end

    return {
      algorithm = algorithms.fixed,
      quota = quota,
      window = window,
      anchored = anchored,
      opens = opens,
      closes = closes,
    }
  end

  local function state()
    return { key = false, start = 0, finish = 0, used = 0 }
  end

  local function open(state, limit)
    local start, used = fetch(state.key)
    local opens, closes = limit.opens, limit.closes
    state.start, state.finish, state.used = opens, closes, 0
    if not start or used == 0 or start > now + min(SLACK, closes - opens) then
      return
    end

    local finish = closes
    if limit.anchored then
      finish = start + limit.window
    elseif start > now then
      -- The clock was set back over a boundary.
      finish = start + closes - opens
    end

    local open = start >= opens
    if limit.anchored then
      open = now < finish
    end
    if open then
      state.start, state.finish, state.used = start, finish, used
    end
  end

  local function write(state)
    store(state.key, state.finish - now, state.start, state.used, 0)
  end

  local function room(state, limit)
    return max(0, limit.quota - state.used)
  end

  local function add(state, _, weight)
    state.used = min(state.used + weight, MAX_TOTAL)
    write(state)
  end

  local function wait(state)
    keep(state.key, state.finish - now)
    return max(1, state.finish - now)
  end

  local function reset(state)
    return state.used > 0 and state.finish - now or 0
  end

  local function refund(state, _, at, weight)
    if state.used > 0 and state.start <= at and at < state.finish then
      state.used = max(0, state.used - weight)
      write(state)
    end
  end

  algorithms.fixed = {
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
