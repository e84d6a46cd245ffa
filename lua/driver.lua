-- Decides any requests, one after the other: reads all charges of a request, then adds to all of them or to none.
--
-- KEYS  the keys of the charges, request after request, each followed by that of its line; of a call across slots of a cluster, the
--       first of them
-- ARGV  1. the time that the boundaries of all calendars enclose, from and until; and of a call across slots the number of runs, or 0
--       2. runs of requests that look alike: operation, how many requests, how many charges each has, how many callers send each of
--          them (0: a number for each request follows the charges), and 1 where a request has keys in several slots; for a refund when
--          it was admitted; for `wait` and `peek` the process, how many of its requests stand in the line and one more (0: it has
--          just arrived), and for each of them when it has arrived and its cost; and the charges
--       charge  rule, cost, quota, x, y and z, for a refund what stays of the charge, and for a calendar five boundaries. The bans of
--               a charge come before it, in its form, with the length of a ban to begin as the cost; `deny` counts a denial of each
--       line    before a charge for which requests may wait: `line`, the longest wait, the cost that comes before it in the process beyond
--               its place, the number of the line, the time in which the whole quota returns (0: it is not known), and 1 where the
--               requests are the first of their process in this line, with the newest arrival in it that the process knows in
--               place of that cost, 2 where they are in one of another slot, or have just arrived and have keys in other slots
--       3. in a call across slots the keys
--       Words end with a zero byte, numbers are little-endian doubles.
-- reply the time, then for each charge of each request: how many of its callers are admitted, remaining, the wait of the next caller
--       (0: this charge fits), the time to a full reset; the time alone where it is not within the boundaries, and then nothing was
--       done. Where requests failed, which have added nothing, a list: that string, with -n in place of the callers of the nth of
--       them, and the texts of their errors (`WRONGTYPE Operation ...`)

local from, til, last_run = unpack_numbers('<ddd', ARGV[1])
if now < from or now >= til then
  return pack('<d', now)
end

-- The keys, and the next one; how many charges belong to requests that were decided.
local keys, next_key, passed = KEYS, 1, 0
-- The packed numbers of the reply, and the errors.
local reply, errors = { pack('<d', now) }, nil

-- Gives a key that has no expiry one.
local function keep(key, til)
  if call('PTTL', key) == -1 then
    call('PEXPIREAT', key, expiry(til))
  end
end

-- Reads a run of requests.
local function read_run(text)
  local run, bans, line, position = { charges = {}, text = text }, nil, nil, nil
  run.operation, run.requests, run.size, run.times, run.spans, position = unpack_numbers('<sdddd', text)
  if run.operation == 'refund' then
    run.admitted_at, position = unpack_numbers('<d', text, position)
  elseif run.operation == 'wait' or run.operation == 'peek' then
    local count
    run.process, count, position = unpack_numbers('<dd', text, position)
    run.waiting = count > 0 and {} or nil
    for place = 1, 2 * count - 2 do
      run.waiting[place], position = unpack_numbers('<d', text, position)
    end
  end
  while #run.charges < run.size do
    local rule, cost, quota, x, y, z, next_closes
    rule, cost, quota, x, y, z, position = unpack_numbers('<sddddd', text, position)
    if rule == 'line' then
      line = { longest = cost, ahead = z == 1 and 0 or quota, known = quota, number = x, cycle = y, leads = z == 1, waits = z > 0 }
    else
      local kept
      if run.operation == 'refund' then
        kept, position = unpack_numbers('<d', text, position)
      end
      if rule == 'fixed' and x == 0 then
        -- The window of the calendar is one of three around the time that the caller guessed.
        local boundaries = { unpack_numbers('<ddddd', text, position) }
        position = boundaries[6]
        for n = 2, 4 do
          if boundaries[n - 1] <= now and now < boundaries[n] then
            y, z, next_closes = boundaries[n - 1], boundaries[n], boundaries[n + 1]
          end
        end
      end
      local charge = { rule = rules[rule], cost = cost, quota = quota, x = x, y = y, z = z, kept = kept, next_closes = next_closes }
      if rule == 'ban' then
        bans = charge
      else
        charge.bans, charge.line, bans, line = bans, line, nil, nil
      end
      run.charges[#run.charges + 1] = charge
    end
  end
  run.position = position
  return run
end

-- Fails unless this node has all keys of a request whose keys lie in several slots.
--
-- A key of a slot that is moving away is found only after a command in its slot (Redis 7.4, Valkey), or in two slots (Redis 8): so each
-- slot is entered from another one before anything is added. What is found here is found by each later command.
local function find_keys(run)
  for _, charge in ipairs(run.charges) do
    call('PTTL', charge.key)
  end
  call('PTTL', run.charges[1].key)
end

-- 1. Reads a charge, and finds how many of the callers fit. The room and the state are a list.
local function read(run, charge, times)
  local rule, cost, operation = charge.rule, charge.cost, run.operation
  charge.state = { rule.read(charge, (operation == 'refund' or operation == 'end') and 0 or times * cost) }
  local room, fits = charge.state[1], times
  if operation == 'renew' and rule.held_until then
    charge.expires = rule.held_until(charge)
    room = charge.expires and math.max(room, cost) or room
  end
  if room < times * cost then
    fits = (room - room % cost) / cost
  end
  charge.room = room
  if charge.line then
    fits = read_line(run, charge, fits)
  end
  charge.lacks = fits < times
  run.may_wait = run.may_wait and (not charge.lacks or charge.line)
  return fits
end

-- 2. Adds a charge for those that are admitted, or does what else the operation does. Returns the time until nothing counts, if it has
-- found it.
local function change(run, charge, admitted)
  local rule, operation = charge.rule, run.operation
  if operation == 'check' or operation == 'wait' or operation == 'charge' then
    if admitted > 0 then
      local reset = rule.add(charge, admitted * charge.cost, admitted, unpack(charge.state, 2, 6))
      charge.room = math.max(0, charge.room - admitted * charge.cost)
      if admitted == run.callers then
        return reset
      end
      charge.state = { rule.read(charge, charge.cost) }
    end
  elseif operation == 'refund' or operation == 'end' and rule.held_until then
    charge.room = rule.give_back(charge, run.admitted_at, charge.cost, unpack(charge.state, 2, 6))
    if not charge.room then
      charge.state = { rule.read(charge, 0) }
      charge.room = charge.state[1]
    end
  elseif operation == 'renew' and rule.held_until and not charge.lacks then
    rule.renew(charge, charge.expires)
    charge.room = math.max(0, charge.quota - charge.total)
  end
end

-- Decides a request, which so many callers send.
local function decide(run, times)
  local charges, operation, banned, admitted = run.charges, run.operation, false, times
  run.callers, run.may_wait, run.leads, run.decided = times, true, false, nil
  for n = 1, run.size do
    local charge = charges[n]
    if charge.rule == ban then
      charge.is_in_force = ban.read(charge)
      banned = banned or charge.is_in_force
      run.may_wait = run.may_wait and not banned
    else
      admitted = math.min(admitted, read(run, charge, times))
    end
  end
  admitted = banned and 0 or admitted
  local requires_room = operation == 'check' or operation == 'wait' or operation == 'renew' or operation == 'peek' and admitted == 0
  admitted = requires_room and admitted or times
  -- Whether a denial is not followed by another check.
  local is_final = operation == 'check' or operation == 'wait' and not (run.waiting and run.leads or not run.waiting and run.may_wait)

  for n = 1, run.size do
    local charge = charges[n]
    local bans = charge.bans
    if charge.rule ~= ban then
      local wait, reset = 0, change(run, charge, admitted)
      local is_denied = charge.room < charge.cost and (operation ~= 'renew' or charge.lacks)
      local cost = admitted < times and is_denied and not charge.line and charge.cost
      if not reset then
        wait, reset = charge.rule.wait(charge, cost, unpack(charge.state, 2, 6))
      end
      local remaining = charge.room
      if charge.line then
        remaining, wait = settle_line(run, charge, admitted)
      end
      -- While one of the bans of a request is in force, none counts a denial.
      if bans and is_final and not banned and charge.lacks and charge.cost <= charge.quota and bans.quota < NEVER then
        ban.deny(bans)
      end
      if wait > 0 and operation ~= 'peek' then
        keep(charge.key, now + reset)
      end
      reply[passed + n + 1] = pack('<dddd', admitted, remaining, wait, reset)
    elseif operation == 'ban' and charge.cost > 0 then
      ban.begin(charge, charge.cost)
    elseif operation == 'deny' and not banned and charge.quota < NEVER then
      ban.deny(charge)
    end
    bans = bans or (operation == 'ban' or operation == 'deny') and charge
    if bans then
      if bans.is_in_force and operation ~= 'peek' then
        keep(bans.key, bans.til)
      end
      reply[passed + n + (bans == charge and 1 or 0)] = pack('<dddd', admitted, ban.state(bans))
    end
  end
end

-- Removes the counts and the bans of a request. Nothing reads a key afterwards: where its slot is moving to another node, that would be
-- an error.
local function reset(run)
  for n = 1, run.size do
    local charge = run.charges[n]
    local remaining = charge.quota
    call('UNLINK', charge.key)
    if charge.line then
      charge.room = charge.quota
      read_line(run, charge, 1)
      remaining = settle_line(run, charge, 0)
    end
    reply[passed + n + 1] = pack('<dddd', 1, remaining, 0, 0)
  end
end

-- The error of Redis without memory, or false; see `checks.lua`. A request of one key adds it or nothing.
local function lacks_memory(charge)
  local answer
  if charge.rule.is_set then
    answer = redis.pcall('ZADD', charge.key, 'XX', '0', '')
  else
    answer = redis.pcall('SETRANGE', charge.key, '0', '')
  end
  return type(answer) == 'table' and answer.err and string.find(answer.err, 'OOM', 1, true) and answer.err
end

-- Decides the nth request of a run.
local function decide_nth(run, nth, full)
  if run.spans == 1 then
    find_keys(run)
  end
  local adds = run.operation == 'check' or run.operation == 'wait' or run.operation == 'charge'
  for n = 1, full and adds and run.size or 0 do
    local charge = run.charges[n]
    if charge.rule ~= ban and call('PTTL', charge.key) == -2 then
      error(full, 0)
    end
  end
  if run.operation == 'reset' then
    reset(run)
  else
    decide(run, run.times > 0 and run.times or unpack_numbers('<d', run.text, run.position + 8 * nth - 8))
  end
end

if last_run > 0 then
  keys = {}
  for place = last_run + 2, #ARGV do
    keys[place - last_run - 1] = ARGV[place]
  end
else
  last_run = #ARGV - 1
end
local full
for n = 1, last_run do
  local run = read_run(ARGV[n + 1])
  for nth = 1, run.requests do
    for _, charge in ipairs(run.charges) do
      charge.key, next_key = keys[next_key], next_key + 1
      if charge.line then
        charge.line.key, next_key = keys[next_key], next_key + 1
      end
    end
    if n == 1 and nth == 1 and (last_run > 1 or run.size * run.requests > 1) then
      full = lacks_memory(run.charges[1])
    end
    local fine, failure = pcall(decide_nth, run, nth, full)
    if not fine then
      -- The request has added nothing. Its error is the reply, from its code on, which may follow the line of the script.
      errors = errors or {}
      errors[#errors + 1] = string.match(failure, '%u%u+ [^\r\n]*') or 'ERR ' .. failure
      for place = passed + 2, passed + 1 + run.size do
        reply[place] = pack('<dddd', -#errors, 0, 0, 0)
      end
    end
    passed = passed + run.size
  end
end
local packed = table.concat(reply)
return errors and { packed, unpack(errors) } or packed
