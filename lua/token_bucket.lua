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
local function tokens(limit, passed)
  local periods = math.floor(passed / limit.period)
  local rest = passed - periods * limit.period

  local count = math.floor(rest / limit.period * limit.rate)
  while time(limit, count + 1) <= rest do
    count = count + 1
  end
  while count > 0 and time(limit, count) > rest do
    count = count - 1
  end
  return periods * limit.rate + count
end

local function settle(state, limit)
  if time(limit, state.spent) <= now - state.since then
    state.since, state.spent = now, 0
  end
end

function bucket.open(key, limit)
  local since, spent, at = load(key, '^(%d+) (%d+) (%d+)$')
  if not since then
    return { key = key, since = now, spent = 0 }
  end

  local state = { key = key, since = tonumber(since), spent = math.min(tonumber(spent), limit.cap) }
  at = tonumber(at)
  if at > now then
    -- The clock was set back: the time that had passed stays passed.
    state.since = math.max(0, state.since - (at - now))
  end
  settle(state, limit)
  return state
end

local function save(state, limit)
  local value = text(state.since) .. ' ' .. text(state.spent) .. ' ' .. now_text
  call('SET', state.key, value, 'PX', ttl(math.max(0, time(limit, state.spent) - (now - state.since))))
end

function bucket.room(state, limit)
  return math.max(0, limit.quota - state.spent + tokens(limit, now - state.since))
end

function bucket.add(state, limit, weight)
  -- Whole periods are settled before the numbers grow too large.
  if state.spent + weight > limit.cap then
    local periods = math.floor((now - state.since) / limit.period)
    state.since = state.since + periods * limit.period
    state.spent = math.max(0, state.spent - periods * limit.rate)
  end
  state.spent = math.min(state.spent + weight, limit.cap)
  save(state, limit)
end

function bucket.wait(state, limit, cost)
  local missing = math.max(0, state.spent + cost - limit.quota)
  local wait = math.max(1, time(limit, missing) - (now - state.since))
  keep(state.key, bucket.reset(state, limit))
  return wait
end

function bucket.reset(state, limit)
  return math.max(0, time(limit, state.spent) - (now - state.since))
end

function bucket.refund(state, limit, at, weight)
  if state.spent > 0 and at >= state.since then
    state.spent = math.max(0, state.spent - weight)
    settle(state, limit)
    save(state, limit)
  end
end
