-- Fixed window: when the open window began, and what was used of it. x is its length, and y is 1 if it begins with the first
-- request; else windows begin at multiples of their length. Those of a calendar have no length: x is 0, and the driver has found
-- that they open at y and close at z, and the window after that at `next_closes`.

local function fixed_read(charge)
  local length, is_anchored = charge.x, charge.x > 0 and charge.y == 1
  local opens, closes = charge.y, charge.z
  if length > 0 then
    opens = is_anchored and now or now - now % length
    closes = opens + length
  end

  local value, expires = call('GET', charge.key), 0
  if value and #value == 32 then
    local start, used, _, kept_until = unpack_numbers('<dddd', value)
    -- The end of the window; of the next one if the clock was set back over the boundary.
    local finish = closes
    if is_anchored or start > now then
      finish = charge.next_closes or start + closes - opens
    end
    local is_open = is_anchored and finish > now or not is_anchored and start >= opens
    if is_open and (start <= now or start <= now + math.min(SLACK, closes - opens)) and 0 < used and used <= MAX_TOTAL then
      return used < charge.quota and charge.quota - used or 0, start, used, finish, kept_until
    end
    expires = kept_until
  end
  return charge.quota, opens, 0, closes, expires
end

local function fixed_add(charge, weight, _, start, used, finish, expires)
  used = used + weight < MAX_TOTAL and used + weight or MAX_TOTAL
  write(charge.key, start, used, 0, expires, finish)
  return finish - now
end

local function fixed_wait(_, cost, _, used, finish)
  return cost and math.max(1, finish - now) or 0, used > 0 and finish - now or 0
end

-- What only the driver needs.

-- The time until a cost fits behind what is before it, where both do not fit now: each window admits a quota.
local function fixed_wait_behind(charge, before, cost, _, used, finish)
  local others = math.max(0, before + cost - math.max(0, charge.quota - used) - 1)
  return (others - others % charge.quota) / charge.quota * charge.line.cycle + math.max(1, finish - now)
end

local function fixed_give_back(charge, at, cost, start, used, finish, expires)
  if used > 0 and start <= at and at < finish then
    write(charge.key, start, math.max(0, used - cost), 0, expires, finish)
  end
end
