-- Sliding window counter: when the current window began, what it has counted, and what the previous one had. The previous window
-- counts in proportion to how much of it the last window covers, in whole ticks, rounded up. x is the window, y a tick, and z the
-- most that is stored, with which products are exact.

local counter = { read = false, add = false, give_back = false, wait = false, reset = false }

local function ticks_of(charge)
  return (charge.x + -charge.x % charge.y) / charge.y
end

local function store(charge)
  write(charge.key, charge.start, charge.current, charge.previous, charge.expires, charge.start + 2 * charge.x)
end

function counter.read(charge)
  local window, tick = charge.x, charge.y
  local start, current, previous, expires = fetch(charge.key)
  local opens = now - now % window
  if start > now then
    -- In the next window: the clock was set back over the boundary. Further ahead, the clock is gone.
    if start > now + min(SLACK, window) then
      start, current, previous = opens, 0, 0
    end
  elseif start < opens then
    start, current, previous = opens, 0, start + window >= opens and current or 0
  else
    start = opens
  end
  charge.start, charge.current, charge.previous, charge.expires = start, current, previous, expires

  local room = charge.quota - current
  if previous > 0 then
    local ticks = ticks_of(charge)
    local left = start < now and ticks - (now - start - (now - start) % tick) / tick or ticks
    local share = min(previous, charge.z) * left
    room = room - (share + -share % ticks) / ticks
  end
  return room > 0 and room or 0
end

function counter.add(charge, weight)
  charge.current = max(charge.current, min(charge.current + weight, charge.z))
  store(charge)
end

function counter.wait(charge, cost)
  local window = charge.x
  local left, counts, opened = charge.quota - charge.current - cost, charge.previous, charge.start
  if left < 0 then
    -- Not in this window: in the next one what counts now will be the previous.
    left, counts, opened = max(0, charge.quota - cost), charge.current, charge.start + window
  end
  -- How long after the start of a window the share of the previous one has shrunk to what is left.
  local ticks = ticks_of(charge)
  local passed = max(0, ticks - floor(left * ticks / max(1, min(counts, charge.z))))
  return max(1, opened + min(passed * charge.y, window) - now)
end

function counter.reset(charge)
  local windows = charge.current > 0 and 2 or charge.previous > 0 and 1
  return windows and charge.start + windows * charge.x - now or 0
end

-- What only the driver needs.

function counter.give_back(charge, at, cost)
  if charge.current + charge.previous == 0 then
    return
  elseif at >= charge.start then
    charge.current = max(0, charge.current - cost)
  elseif at + charge.x >= charge.start then
    charge.previous = max(0, charge.previous - cost)
  end
  store(charge)
end
