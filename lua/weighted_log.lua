-- The rule of a sliding log that is more than a count of equal members: it has weights, a precision, charges beyond its
-- limit, entries of several windows, or entries of a clock that is gone.

-- Makes the rule.
local function make_weighted_log()
  local at_rank, weight_of, read, describe, simplify, remove, insert, remove_expired, skip_older_than = make_log_entries()
  -- Made when a charge needs them.
  local windows, merges

  -- Subtracts what a clock that was set back has left from the total.
  local function skip_gone(log)
    local count, last = math.min(log.gone, log.budget - 2), log.headers + log.stored - 1
    if log.kind == '=' then
      log.total = log.total - log.gone
    else
      log.total, log.budget = log.total - weight_of(log, last - count + 1, last), log.budget - count
    end
  end

  -- Removes it for a charge that is denied, newest first, or does not count it for one that only reads.
  local function forget_gone(log, window, exact)
    if operation == 'peek' then
      return skip_gone(log)
    end
    local count = math.max(0, math.min(log.gone, log.budget - 2))
    if count > 0 then
      log.total = log.total - remove(log, log.headers + log.stored - count, count)
      log.gone = log.gone - count
    end
    simplify(log, exact)
    if log.kind == '=' and log.gone > 0 then
      log.total = log.weight
      skip_older_than(log, window)
      log.total = log.total - log.gone
    end
  end

  -- Finds what counts, and removes what no longer does.
  local function advance(log, quota, weight, window, exact)
    log.longest = math.max(window, log.window)
    if #log.longer > 0 then
      windows = windows or make_log_windows(at_rank, describe)
      windows.expire(log)
    end
    if log.stored == 0 then
      return
    end
    remove_expired(log, exact)
    if operation == 'peek' or log.longest > window or log.kind == '=' then
      skip_older_than(log, window)
    end
    -- A charge that fits does not remove entries that are ahead of the clock.
    if math.max(0, quota - log.total) >= weight then
      return
    end
    log.gone = call('ZCOUNT', log.key, '(' .. digits(now + math.min(SLACK, log.longest)), '+inf')
    if log.gone > 0 then
      forget_gone(log, window, exact)
    end
  end

  -- Stores the window of an entry that is added at this time.
  local function store_window(log, window, at)
    if window ~= log.window then
      windows = windows or make_log_windows(at_rank, describe)
      windows.store(log, window, at)
    end
  end

  -- Sets the expiry to the time when the last entry does not count under any window.
  local function set_expiry(log, window)
    local til = now + window
    for _, longer in ipairs(log.longer) do
      til = math.max(til, longer[2])
    end
    call('PEXPIREAT', log.key, expiry(til))
  end

  -- The weight that is stored for some callers: a debt is bounded, and what fits is stored in full beside a debt under a longer
  -- window.
  local function bounded(log, counted, cost, quota)
    local fits = math.min(counted, math.floor(math.max(0, quota - log.total) / cost))
    local debts, debt = counted - fits, math.max(0, MAX_TOTAL - log.weight - fits * cost)
    return fits * cost + math.max(debts, math.min(debts * cost, debt))
  end

  -- Adds the weight of an admission, or of a charge.
  local function add(log, counted, cost, quota, window, grain)
    local beyond = grain == 0 and log.stored > 0 and log.total >= quota
    store_window(log, window, now)
    local weight = counted * cost
    local are_equal = log.kind == '=' and cost == 1 and counted <= FEW and grain == 0 and not beyond
    if not are_equal and log.weight + weight > MAX_TOTAL then
      weight = bounded(log, counted, cost, quota)
    end
    log.weight, log.total = log.weight + weight, log.total + weight
    if are_equal then
      describe(log)
      admit(log.key, counted, log.stored)
      log.stored = log.stored + counted
      return
    end
    log.kind = log.kind == '=' and '#' or log.kind
    if grain > 0 or beyond then
      merges = merges or make_log_merges(insert)
      merges.merge(log, weight, grain > 0 and grain or math.ceil(window / STEPS), beyond)
    else
      insert(log, now, '', 0, weight)
    end
  end

  -- Decides a charge of any log.
  local function decide(key, times, rest, cost, quota, window, grain, _, request, members)
    local log = read(key, members)
    advance(log, quota, times * cost, window, grain == 0)
    local room, counted = math.max(0, quota - log.total), times
    if room < times * cost then
      counted = (room - room % cost) / cost
    end
    local is_denied, refunded_at = counted < times, nil
    if rest then
      counted, is_denied, refunded_at = rest(request, room, counted, cost, quota)
    end

    if refunded_at and log.stored > 0 then
      merges = merges or make_log_merges(insert)
      merges.refund(log, refunded_at, cost, window, grain)
      room = math.max(0, quota - log.total)
    elseif counted > 0 then
      add(log, counted, cost, quota, window, grain)
      set_expiry(log, window)
      room = math.max(0, room - counted * cost)
    elseif is_denied then
      keep(key, now + log.longest)
    end

    local wait = is_denied and wait_of_log(log, cost, quota, window) or 0
    return counted, room, wait, counted > 0 and window or reset_of_log(log, window)
  end

  return decide
end
