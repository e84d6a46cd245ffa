-- Token bucket, as the generic cell rate algorithm reckons it: since when the bucket is not full, how many tokens were
-- taken since then, and when the last was. `rate` tokens come in `period` microseconds, in lowest terms.

local bucket = {}
algorithms.bucket = bucket

function bucket.limit(take)
  local quota, rate, period, cap = take(), take(), take(), take()
  return { quota = quota, rate = rate, period = period, cap = cap, whole = math.floor(period / rate), rest = period % rate }
end

-- How long it takes until this many tokens have come, rounded up. Split so that no product leaves 2^53.
local function time(limit, tokens)
  return tokens * limit.whole + math.ceil(tokens * limit.rest / limit.rate)
end

-- How many tokens come in this time.
local function tokens(limit, span)
  local periods = math.floor(span / limit.period)
  local rest = span - periods * limit.period

  local count = math.floor(rest / limit.period * limit.rate)
  while time(limit, count + 1) <= rest do
    count = count + 1
  end
  while count > 0 and time(limit, count) > rest do
    count = count - 1
  end
  return periods * limit.rate + count
end

local function passed(state)
  return math.max(0, now - state.since)
end

local function settle(state, limit)
  -- What was taken too far ahead of the clock belongs to a clock that is gone.
  local gone = state.at > now + math.min(SLACK, time(limit, limit.quota))
  if gone or time(limit, state.spent) <= passed(state) then
    state.since, state.spent, state.at = now, 0, now
  end
end

function bucket.open(key, limit)
  local since, spent, at = numbers_of(key, '^(%d+) (%d+) (%d+)$')
  if not since then
    return { key = key, since = now, spent = 0, at = now }
  end

  local state = { key = key, since = tonumber(since), spent = math.min(tonumber(spent), limit.cap), at = tonumber(at) }
  settle(state, limit)
  return state
end

local function save(state, limit)
  local value = text(state.since) .. ' ' .. text(state.spent) .. ' ' .. text(math.max(state.at, now))
  call('SET', state.key, value, 'PX', ttl(math.max(0, state.since + time(limit, state.spent) - now)))
end

function bucket.room(state, limit)
  return math.max(0, limit.quota - state.spent + tokens(limit, passed(state)))
end

function bucket.add(state, limit, weight)
  -- Whole periods are settled before the numbers grow too large.
  if state.spent + weight > limit.cap then
    local periods = math.floor(passed(state) / limit.period)
    state.since = state.since + periods * limit.period
    state.spent = math.max(0, state.spent - periods * limit.rate)
  end
  state.spent = math.min(state.spent + weight, limit.cap)
  save(state, limit)
end

function bucket.wait(state, limit, cost)
  local missing = math.max(0, state.spent + cost - limit.quota)
  local wait = math.max(1, state.since + time(limit, missing) - now)
  keep(state.key, bucket.reset(state, limit))
  return wait
end

function bucket.reset(state, limit)
  return state.spent > 0 and math.max(0, state.since + time(limit, state.spent) - now) or 0
end

function bucket.refund(state, limit, at, weight)
  if state.spent > 0 and at >= state.since then
    state.spent = math.max(0, state.spent - weight)
    settle(state, limit)
    save(state, limit)
  end
end
