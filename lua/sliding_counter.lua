-- Sliding window counter: when the current window began, what it has counted, and what the previous one had. The
-- previous window counts in proportion to how much of it the last window covers, in whole ticks, rounded up.

function algorithms.counter(cost, quota, window, tick, cap)
  local ticks, opens = ceil(window / tick), now - now % window
  local slack = min(SLACK, window)
  local key, start, current, previous, expires

  -- How long after the start of a window the share of the previous one has shrunk to `room`. What was counted under another
  -- limit may be above `cap`: the product with it would not be exact.
  local function shrinks(counted, room)
    local passed = max(0, ticks - floor(room * ticks / max(1, min(counted, cap))))
    return min(passed * tick, window)
  end

  local function room()
    local share = 0
    if previous > 0 then
      local passed = floor(max(0, now - start) / tick)
      share = ceil(min(previous, cap) * max(0, ticks - passed) / ticks)
    end
    return max(0, quota - current - share)
  end

  local function save()
    write(key, start, current, previous, expires, start + 2 * window)
  end

  local charge = { cost = cost, quota = quota }

  function charge.open(name)
    key = name
    start, current, previous, expires = fetch(key)
    if start + window < opens or start > now + slack then
      start, current, previous = opens, 0, 0
    elseif start < opens then
      start, current, previous = opens, 0, current
    elseif start <= now then
      start = opens
    end
    -- Otherwise in the next window: the clock was set back over the boundary.
    return room()
  end

  function charge.add(weight)
    current = max(current, min(current + weight, cap))
    save()
  end

  function charge.wait()
    keep(key, start + 2 * window)

    local left = quota - current - cost
    local at
    if left >= 0 then
      at = start + shrinks(previous, left)
    else
      -- Not in this window: in the next one what counts now will be the previous.
      at = start + window + shrinks(current, max(0, quota - cost))
    end
    return max(1, at - now)
  end

  function charge.reset()
    if current > 0 then
      return start + 2 * window - now
    end
    return previous > 0 and start + window - now or 0
  end

  if not refunding then
    return charge
  end

  function charge.refund(admitted_at, weight)
    if current + previous > 0 then
      if admitted_at >= start then
        current = max(0, current - weight)
      elseif admitted_at + window >= start then
        previous = max(0, previous - weight)
      end
      save()
    end
    return room()
  end

  return charge
end
