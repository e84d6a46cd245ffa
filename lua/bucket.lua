-- Token bucket, as in the generic cell rate algorithm: the time since which the bucket is not full, the tokens taken since then, and
-- the time of the last one. x tokens come in y microseconds, in lowest terms; z is the most that is stored, with which products are
-- exact.

local bucket = { read = false, add = false, give_back = false, wait = false, reset = false }

-- How long it takes until this many tokens have come, rounded up. Split so that no product leaves 2^53.
local function time_of(charge, tokens)
  local rate, period = charge.x, charge.y
  if rate == 1 then
    return tokens * period
  end
  local over = tokens * (period % rate)
  return tokens * ((period - period % rate) / rate) + (over + -over % rate) / rate
end

-- How many tokens come in this time.
local function tokens_in(charge, span)
  local rate, period = charge.x, charge.y
  local left = span % period
  local periods = (span - left) / period
  if rate == 1 then
    return periods
  end

  local count = floor(left / period * rate)
  while time_of(charge, count + 1) <= left do
    count = count + 1
  end
  while count > 0 and time_of(charge, count) > left do
    count = count - 1
  end
  return periods * rate + count
end

-- Forgets what has come back, and what was taken too far ahead of the clock: that belongs to a clock that is gone.
local function settle(charge)
  charge.full = charge.since + time_of(charge, charge.spent)
  local ahead = charge.at > now and charge.at > now + min(SLACK, time_of(charge, charge.quota))
  if charge.full <= now or charge.spent == 0 or ahead then
    charge.since, charge.spent, charge.at, charge.full = now, 0, now, now
  end
end

local function store(charge)
  write(charge.key, charge.since, charge.spent, charge.at, charge.expires, charge.full)
end

function bucket.read(charge)
  local since, spent, at, expires = fetch(charge.key)
  charge.since, charge.spent, charge.at, charge.expires = since, spent < charge.z and spent or charge.z, at, expires
  settle(charge)
  local room = charge.quota - charge.spent
  if charge.since < now then
    room = room + tokens_in(charge, now - charge.since)
  end
  return room > 0 and room or 0
end

function bucket.add(charge, weight)
  local spent = charge.spent + weight
  if spent > charge.z then
    -- Whole periods are settled before the numbers grow too large.
    local periods = floor(max(0, now - charge.since) / charge.y)
    charge.since = charge.since + periods * charge.y
    spent = min(max(0, charge.spent - periods * charge.x) + weight, charge.z)
  end
  charge.spent = spent
  charge.at = charge.at < now and now or charge.at
  charge.full = charge.since + time_of(charge, spent)
  store(charge)
end

function bucket.wait(charge, cost)
  local missing = min(charge.spent, max(0, charge.spent + cost - charge.quota))
  return max(1, charge.since + time_of(charge, missing) - now)
end

function bucket.reset(charge)
  return charge.full > now and charge.full - now or 0
end

-- What only the driver needs.

-- How long it takes until this many tokens have come, rounded down.
local function time_rounded_down(charge, tokens)
  return time_of(charge, tokens) - (tokens * (charge.y % charge.x) % charge.x > 0 and 1 or 0)
end

-- If nothing was taken after these tokens, they are all that are missing. Else those that came since then may all have been theirs;
-- one of which a part has come is not given back, and comes when it would have come.
function bucket.give_back(charge, at, cost)
  if charge.spent == 0 or at < charge.since then
    return
  end
  local span = at < charge.at and max(0, now - at) or 0
  local come = tokens_in(charge, span)
  if cost <= come then
    return
  end
  if time_rounded_down(charge, come) < span then
    come = come + 1
  end
  charge.since = max(0, charge.since - (time_rounded_down(charge, come) - span))
  charge.spent = max(0, charge.spent - (cost - come))
  settle(charge)
  store(charge)
end
