-- Fixed window: when the open window began, and what was used of it.
--
-- Anchored windows begin with the first request, aligned ones at multiples of their length, and those of a calendar at
-- boundaries that come with the call, some around the time that the caller guessed.

if algorithm == 'fixed' then
  if not fixed then
    function fixed(key, times, rest, cost, quota, opens, closes, anchored)
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

      local room, counted = quota - used, times
      if room < times * cost then
        room = room < 0 and 0 or room
        counted = (room - room % cost) / cost
      end
      local waits = counted < times
      if rest then
        local refunded_at
        counted, waits, refunded_at = rest(room, counted, cost, quota)
        if refunded_at and used > 0 and start <= refunded_at and refunded_at < finish then
          used = math.max(0, used - cost)
          write(key, start, used, 0, expires, finish)
          room = math.max(0, quota - used)
        end
      end

      if counted > 0 then
        local weight = counted * cost
        used = used + weight
        if used > MAX_TOTAL then
          used = MAX_TOTAL
        end
        write(key, start, used, 0, expires, finish)
        room = room - weight
        if room < 0 then
          room = 0
        end
      end

      local wait = 0
      if waits then
        if counted == 0 then
          keep(key, finish)
        end
        wait = math.max(1, finish - now)
      end
      return counted, room, wait, used > 0 and finish - now or 0
    end
  end
  rule = fixed
  local length, anchored = x, y == 1
  if anchored then
    x, y = now, now + length
  elseif length > 0 then
    x = now - now % length
    y = x + length
  else
    local boundaries = { unpack_numbers('<dddd', ARGV[run], position) }
    position = boundaries[5]
    for i = 2, 4 do
      if boundaries[i - 1] <= now and now < boundaries[i] then
        x, y = boundaries[i - 1], boundaries[i]
      end
    end
  end
  z = anchored
end
