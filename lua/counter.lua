-- Sliding window counter: when the current window began, what it has counted, and what the previous one had. The previous window
-- counts in proportion to how much of it the last window covers, in whole ticks, rounded up. x is the window, y a tick, and z the
-- most that is stored, with which products are exact.

local function counter_read(charge)
  local window, tick = charge.x, charge.y
  local opens = now - now % window
  local start, current, previous, value, expires = opens, 0, 0, call('GET', charge.key), 0
  if value and #value == 32 then
    local began, counted, before, kept_until = unpack_numbers('<dddd', value)
    expires = kept_until
    if began >= opens and (began <= now or began <= now + math.min(SLACK, window)) then
      -- In this window, or in the next one if the clock was set back over the boundary.
      start, current, previous = began, counted, before
    elseif began < opens and began + window >= opens then
      previous = counted
    end
    if not (0 <= current and current < EXACT and 0 <= previous and previous < EXACT) then
      current, previous = 0, 0
    end
  end

  local room = charge.quota - current
  if previous > 0 then
    local ticks = (window + -window % tick) / tick
    local left = start < now and ticks - (now - start - (now - start) % tick) / tick or ticks
    local share = math.min(previous, charge.z) * left
    room = room - (share + -share % ticks) / ticks
  end
  return room > 0 and room or 0, start, current, previous, expires
end

local function counter_add(charge, weight, _, start, current, previous, expires)
  current = current + weight <= charge.z and current + weight or math.max(current, charge.z)
  local til = start + 2 * charge.x
  write(charge.key, start, current, previous, expires, til)
  return til - now
end

local function counter_wait(charge, cost, start, current, previous)
  local window, tick, wait = charge.x, charge.y, 0
  if cost then
    -- A cost above the quota waits as long as the quota.
    cost = math.min(cost, charge.quota)
    local left, counts, opened = charge.quota - current - cost, previous, start
    if left < 0 then
      -- Not in this window: in the next one what counts now will be the previous.
      left, counts, opened = charge.quota - cost, current, start + window
    end
    -- How long after the start of a window the share of the previous one has shrunk to what is left.
    local ticks = (window + -window % tick) / tick
    local passed = math.max(0, ticks - math.floor(left * ticks / math.max(1, math.min(counts, charge.z))))
    wait = math.max(1, opened + math.min(passed * tick, window) - now)
  end
  local windows = current > 0 and 2 or previous > 0 and 1
  return wait, windows and start + windows * window - now or 0
end

-- What only the driver needs.

-- The time until a cost fits behind what is before it, or less than that: each window admits a quota at most, and the last one what the
-- share of the window before leaves.
local function counter_wait_behind(charge, before, cost, start, current, previous)
  local quota, window, tick = charge.quota, charge.x, charge.y
  local total = math.min(current, quota) + before + cost
  local wait = (counter_wait(charge, total <= quota and before + cost or cost, start, current, previous))
  if total <= quota then
    return wait
  end
  local rest = total % quota
  local part = rest * ((window + -window % tick) / tick)
  return math.max(wait, start + (total - rest) / quota * window + (part - part % quota) / quota * tick - now)
end

local function counter_give_back(charge, at, cost, start, current, previous, expires)
  if current + previous == 0 then
    return
  elseif at >= start then
    current = math.max(0, current - cost)
  elseif at + charge.x >= start then
    previous = math.max(0, previous - cost)
  end
  write(charge.key, start, current, previous, expires, start + (current > 0 and 2 or 1) * charge.x)
end
