-- Sliding window counter: when the current window began, what it has counted, and what the previous one had. The
-- previous window counts in proportion to how much of it the last window covers, in whole ticks, rounded up.

if algorithm == 'counter' then
  if not counter then
    function counter(key, times, rest, cost, quota, window, tick, cap)
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

      -- What was counted under another limit may be above `cap`: the product with it would not be exact.
      local room, counted = quota - current, times
      if previous > 0 then
        local ticks = (window + -window % tick) / tick
        local left = ticks
        if start < now then
          left = ticks - (now - start - (now - start) % tick) / tick
        end
        local share = (previous < cap and previous or cap) * left
        room = room - (share + -share % ticks) / ticks
      end
      if room < times * cost then
        room = room < 0 and 0 or room
        counted = (room - room % cost) / cost
      end
      local waits = counted < times
      if rest then
        local refunded_at
        counted, waits, refunded_at = rest(room, counted, cost, quota)
        if refunded_at and current + previous > 0 then
          if refunded_at >= start then
            current = math.max(0, current - cost)
          elseif refunded_at + window >= start then
            previous = math.max(0, previous - cost)
          end
          write(key, start, current, previous, expires, start + 2 * window)
          return counter(key, 0, nil, cost, quota, window, tick, cap)
        end
      end

      if counted > 0 then
        local weight = counted * cost
        if current + weight <= cap then
          current = current + weight
        elseif current < cap then
          current = cap
        end
        write(key, start, current, previous, expires, start + 2 * window)
        room = room - weight
        if room < 0 then
          room = 0
        end
      end

      local wait = 0
      if waits then
        if counted == 0 then
          keep(key, start + 2 * window)
        end
        local left, counts = quota - current - cost, previous
        local opened = start
        if left < 0 then
          -- Not in this window: in the next one what counts now will be the previous.
          left, counts, opened = math.max(0, quota - cost), current, start + window
        end
        -- How long after the start of a window the share of the previous one has shrunk to what is left.
        local ticks = (window + -window % tick) / tick
        local gone = math.max(0, ticks - math.floor(left * ticks / math.max(1, math.min(counts, cap))))
        wait = math.max(1, opened + math.min(gone * tick, window) - now)
      end
      if current > 0 then
        return counted, room, wait, start + 2 * window - now
      end
      return counted, room, wait, previous > 0 and start + window - now or 0
    end
  end
  rule = counter
end
