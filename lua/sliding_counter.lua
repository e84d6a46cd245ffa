-- Sliding window counter: when the current window began, what it has counted, and what the previous one had. The
-- previous window counts in proportion to how much of it the last window covers, in whole ticks, rounded up.

if sliding_counter then
  -- Time until the cost fits, at least 1.
  local function wait(start, current, previous, cost, quota, window, tick, cap)
    local left, counts, opened = quota - current - cost, previous, start
    if left < 0 then
      -- Not in this window: in the next one what counts now will be the previous.
      left, counts, opened = math.max(0, quota - cost), current, start + window
    end
    -- How long after the start of a window the share of the previous one has shrunk to what is left.
    local ticks = (window + -window % tick) / tick
    local passed = math.max(0, ticks - math.floor(left * ticks / math.max(1, math.min(counts, cap))))
    return math.max(1, opened + math.min(passed * tick, window) - now)
  end

  -- Decides a charge of a sliding counter.
  function sliding_counter(key, times, rest, cost, quota, window, tick, cap, request)
    local start, current, previous, expires = fetch(key)
    local opens = now - now % window
    if start > now then
      -- In the next window: the clock was set back over the boundary. Further ahead, the clock is gone.
      if start > now + math.min(SLACK, window) then
        start, current, previous = opens, 0, 0
      end
    elseif start < opens then
      start, current, previous = opens, 0, start + window >= opens and current or 0
    else
      start = opens
    end

    local room, counted, refunded_at = quota - current, times, nil
    if previous > 0 then
      local ticks = (window + -window % tick) / tick
      local left = start < now and ticks - (now - start - (now - start) % tick) / tick or ticks
      -- What was counted under another limit may be above `cap`: the product with it would not be exact.
      local share = (previous < cap and previous or cap) * left
      room = room - (share + -share % ticks) / ticks
    end
    if room < times * cost then
      room = room < 0 and 0 or room
      counted = (room - room % cost) / cost
    end
    local waits = counted < times
    if rest then
      counted, waits, refunded_at = rest(request, room, counted, cost, quota)
    end

    if refunded_at and current + previous > 0 then
      if refunded_at >= start then
        current = math.max(0, current - cost)
      elseif refunded_at + window >= start then
        previous = math.max(0, previous - cost)
      end
      write(key, start, current, previous, expires, start + 2 * window)
      return sliding_counter(key, 0, nil, cost, quota, window, tick, cap)
    elseif counted > 0 then
      local weight = counted * cost
      current = current + weight < cap and current + weight or current < cap and cap or current
      write(key, start, current, previous, expires, start + 2 * window)
      room = room > weight and room - weight or 0
    elseif waits then
      keep(key, start + 2 * window)
    end
    local ends = current > 0 and start + 2 * window or previous > 0 and start + window or now
    return counted, room, waits and wait(start, current, previous, cost, quota, window, tick, cap) or 0, ends - now
  end
end
