-- Fixed window: when the open window began, and what was used of it. x is its length, and y is 1 if it begins with the first
-- request; else windows begin at multiples of their length. Those of a calendar have no length: x is 0, and the driver has found
-- that they open at y and close at z.

local window = { read = false, add = false, give_back = false, wait = false, reset = false }

function window.read(charge)
  local length, is_anchored = charge.x, charge.x > 0 and charge.y == 1
  local opens, closes = charge.y, charge.z
  if length > 0 then
    opens = is_anchored and now or now - now % length
    closes = opens + length
  end

  local start, used, _, expires = fetch(charge.key)
  -- The end of a window that is open; in the next window if the clock was set back over the boundary.
  local finish = (is_anchored or start > now) and start + closes - opens or closes
  if
    used == 0
    or is_anchored and finish <= now
    or not is_anchored and start < opens
    or start > now and start > now + min(SLACK, closes - opens)
  then
    start, finish, used = opens, closes, 0
  end
  charge.start, charge.finish, charge.used, charge.expires = start, finish, used, expires
  return used < charge.quota and charge.quota - used or 0
end

function window.add(charge, weight)
  charge.used = min(charge.used + weight, MAX_TOTAL)
  write(charge.key, charge.start, charge.used, 0, charge.expires, charge.finish)
end

function window.wait(charge)
  return max(1, charge.finish - now)
end

function window.reset(charge)
  return charge.used > 0 and charge.finish - now or 0
end

-- What only the driver needs.

function window.give_back(charge, at, cost)
  if charge.used > 0 and charge.start <= at and at < charge.finish then
    window.add(charge, -min(cost, charge.used))
  end
end
