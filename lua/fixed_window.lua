-- Fixed window: when the open window began, and what was used of it.
--
-- Anchored windows begin with the first request, aligned ones at multiples of their length, and those of a calendar at
-- boundaries that come with the call, some around the time that the caller guessed.

function algorithms.fixed(cost, quota, window, anchored, ...)
  anchored = anchored == 1
  local opens = anchored and now or now - now % max(1, window)
  local closes = opens + window
  if ... then
    opens = nil
    local boundaries = { ... }
    for i = 2, #boundaries do
      if boundaries[i - 1] <= now and now < boundaries[i] then
        opens, closes = boundaries[i - 1], boundaries[i]
      end
    end
    outside_calendar = outside_calendar or not opens
  end
  local key, start, finish, used, expires, _

  local function save()
    write(key, start, used, 0, expires, finish)
  end

  local charge = { cost = cost, quota = quota }

  function charge.open(name)
    key = name
    start, used, _, expires = fetch(key)
    local open = used > 0 and start <= now + min(SLACK, closes - opens)
    if open and anchored then
      finish = start + window
      open = now < finish
    elseif open then
      -- In the next window if the clock was set back over the boundary.
      finish = start > now and start + closes - opens or closes
      open = start >= opens
    end
    if not open then
      start, finish, used = opens, closes, 0
    end
    return max(0, quota - used)
  end

  function charge.add(weight)
    used = min(used + weight, MAX_TOTAL)
    save()
  end

  function charge.wait()
    keep(key, finish)
    return max(1, finish - now)
  end

  function charge.reset()
    return used > 0 and finish - now or 0
  end

  if not refunding then
    return charge
  end

  function charge.refund(admitted_at, weight)
    if used > 0 and start <= admitted_at and admitted_at < finish then
      used = max(0, used - weight)
      save()
    end
    return max(0, quota - used)
  end

  return charge
end
