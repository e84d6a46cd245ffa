-- Sliding window counter: when the current window began, what it has counted, and what the previous one had. The
-- previous window counts in proportion to how much of it the last window covers, in whole ticks, rounded up.

local counter = {}
algorithms.counter = counter

function counter.limit(take)
  local quota, window, tick, cap = take(), take(), take(), take()
  return { quota = quota, window = window, tick = tick, ticks = math.ceil(window / tick), cap = cap }
end

function counter.open(key, limit)
  local opens = now - now % limit.window
  local start, current, previous = numbers_of(key, '^(%d+) (%d+) (%d+)$')
  start, current, previous = tonumber(start or 0), tonumber(current or 0), tonumber(previous or 0)

  if start > now + math.min(SLACK, limit.window) then
    start, current, previous = opens, 0, 0
  elseif start >= opens then
    -- In this window, or in the next one if the clock was set back over the boundary.
    start = start > now and start or opens
  elseif start + limit.window >= opens then
    start, current, previous = opens, 0, current
  else
    start, current, previous = opens, 0, 0
  end
  return { key = key, start = start, current = current, previous = previous }
end

local function share(state, limit)
  local passed = math.floor(math.max(0, now - state.start) / limit.tick)
  return math.ceil(state.previous * math.max(0, limit.ticks - passed) / limit.ticks)
end

-- How long after the start of a window the share of the previous one has shrunk to `room`.
local function shrinks(limit, previous, room)
  local passed = math.max(0, limit.ticks - math.floor(room * limit.ticks / math.max(1, previous)))
  return math.min(passed * limit.tick, limit.window)
end

local function save(state, limit)
  local value = text(state.start) .. ' ' .. text(state.current) .. ' ' .. text(state.previous)
  call('SET', state.key, value, 'PX', ttl(state.start + 2 * limit.window - now))
end

function counter.room(state, limit)
  return math.max(0, limit.quota - state.current - share(state, limit))
end

function counter.add(state, limit, weight)
  state.current = math.min(state.current + weight, limit.cap)
  save(state, limit)
end

function counter.wait(state, limit, cost)
  keep(state.key, state.start + 2 * limit.window - now)

  local room = limit.quota - state.current - cost
  local at
  if room >= 0 then
    at = state.start + shrinks(limit, state.previous, room)
  else
    -- Not in this window: in the next one what counts now will be the previous.
    at = state.start + limit.window + shrinks(limit, state.current, math.max(0, limit.quota - cost))
  end
  return math.max(1, at - now)
end

function counter.reset(state, limit)
  if state.current > 0 then
    return state.start + 2 * limit.window - now
  end
  return state.previous > 0 and state.start + limit.window - now or 0
end

function counter.refund(state, limit, at, weight)
  if state.current + state.previous == 0 then
    return
  end

  if at >= state.start then
    state.current = math.max(0, state.current - weight)
  elseif at + limit.window >= state.start then
    state.previous = math.max(0, state.previous - weight)
  end
  save(state, limit)
end
