-- Fixed window: when the open window began, and what was used of it.

local fixed = {}
algorithms.fixed = fixed

-- Anchored windows begin with the first request, aligned ones at multiples of their length, and those of a calendar at
-- boundaries that come with the call, some around the time that the caller guessed.
function fixed.limit(take)
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

  return { quota = quota, window = window, anchored = anchored, opens = opens, closes = closes }
end

function fixed.open(key, limit)
  local start, used = numbers_of(key, '^(%d+) (%d+)$')
  if not start then
    return { key = key, start = limit.opens, finish = limit.closes, used = 0 }
  end

  start, used = tonumber(start), tonumber(used)
  local finish = limit.closes
  if limit.anchored then
    finish = start + limit.window
  elseif start > now then
    -- The clock was set back over a boundary.
    finish = start + limit.closes - limit.opens
  end

  local open = start >= limit.opens
  if limit.anchored then
    open = now < finish
  end
  if used > 0 and open and start <= now + math.min(SLACK, limit.closes - limit.opens) then
    return { key = key, start = start, finish = finish, used = used }
  end
  return { key = key, start = limit.opens, finish = limit.closes, used = 0 }
end

local function save(state)
  call('SET', state.key, text(state.start) .. ' ' .. text(state.used), 'PX', ttl(state.finish - now))
end

function fixed.room(state, limit)
  return math.max(0, limit.quota - state.used)
end

function fixed.add(state, _, weight)
  state.used = math.min(state.used + weight, MAX_TOTAL)
  save(state)
end

function fixed.wait(state)
  keep(state.key, state.finish - now)
  return math.max(1, state.finish - now)
end

function fixed.reset(state)
  return state.used > 0 and state.finish - now or 0
end

function fixed.refund(state, _, at, weight)
  if state.used > 0 and state.start <= at and at < state.finish then
    state.used = math.max(0, state.used - weight)
    save(state)
  end
end
