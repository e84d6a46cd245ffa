-- Fixed window: when the open window began, and what was used of it.
--
-- Anchored windows begin with the first request, aligned ones at multiples of their length. Those of a calendar have no length:
-- they come with the call.

if fixed_window then
  -- Decides a charge of a fixed window.
  function fixed_window(key, times, rest, cost, quota, length, opens, closes, request)
    local anchored = length > 0 and opens == 1
    if length > 0 then
      opens = anchored and now or now - now % length
      closes = opens + length
    end

    local start, used, _, expires = fetch(key)
    -- The end of a window that is open; in the next window if the clock was set back over the boundary.
    local finish = (anchored or start > now) and start + closes - opens or closes
    if
      used == 0
      or anchored and finish <= now
      or not anchored and start < opens
      or start > now and start > now + math.min(SLACK, closes - opens)
    then
      start, finish, used = opens, closes, 0
    end

    local room, counted, refunded_at = quota - used, times, nil
    if room < times * cost then
      room = room < 0 and 0 or room
      counted = (room - room % cost) / cost
    end
    local waits = counted < times
    if rest then
      counted, waits, refunded_at = rest(request, room, counted, cost, quota)
    end

    if refunded_at and used > 0 and start <= refunded_at and refunded_at < finish then
      used = math.max(0, used - cost)
      write(key, start, used, 0, expires, finish)
      room = math.max(0, quota - used)
    elseif counted > 0 then
      local weight = counted * cost
      used = used + weight < MAX_TOTAL and used + weight or MAX_TOTAL
      write(key, start, used, 0, expires, finish)
      room = room > weight and room - weight or 0
    elseif waits then
      keep(key, finish)
    end
    return counted, room, waits and math.max(1, finish - now) or 0, used > 0 and finish - now or 0
  end
end
