-- Ending claims and rows.

-- A function of a lease, whose arguments begin with slot, serial and call: change(t, lease, args) where it is valid, {"ok", ...} or
-- {"fenced"}. `call` is a number of the caller's own: the call that ended the lease is answered {"ok", 1} when it is repeated.
local function under_lease(name, change)
  of_table(name, function(t, args)
    local held = lease_of(t, args[1], args[2])
    if held and held.over and held.call == args[3] then return {'ok', 1} end
    if not held or held.over then
      t.state[FENCED] = t.state[FENCED] + 1
      commit(t)
      return {'fenced'}
    end
    local reply = change(t, held, args) or {'ok', 1}
    commit(t)
    return reply
  end, 'allow-oom')
end

-- ack(slot, serial, call)
under_lease('ack', function(t, held, args)
  end_lease(t, held, args[3])
  each_chunk(t, held.fields, 5, function(chunk, ranges) ack_rows(t, chunk, held.stage, ranges) end)
end)

-- give_back(slot, serial, call, 1 to count the delivery, label when dead, reason)
under_lease('give_back', function(t, held, args)
  end_lease(t, held, args[3])
  each_chunk(t, held.fields, 5, function(chunk, ranges)
    give_back(t, chunk, held.stage, ranges, args[4] == 1, {args[5], args[6]})
  end)
end)

-- extend(slot, serial, call): {"ok"} or {"fenced"}.
under_lease('extend', function(t, held)
  held.fields[2] = t.now + t.stages[held.stage].lease_ms
  redis.call('HSET', t.prefix .. KEY.leases, held.slot, cmsgpack.pack(held.fields))
  t.state[DUE] = math.min(t.state[DUE], held.fields[2])
end)

-- finish(slot, serial, call, state, label, reason, step, {chunk, first, count}...): {"ok", 1 when the claim is over}.
-- Rows that this lease does not hold any more are left alone. No ranges: all rows of the claim.
under_lease('finish', function(t, held, args)
  local i = held.stage
  local final = {state = args[4], label = args[5], reason = args[6], step = args[7]}
  local some, from = held.fields, 5
  if #args > 7 then
    some, from = {}, 1
    for k = 8, #args, 3 do
      some[#some + 1], some[#some + 2], some[#some + 3] = args[k], args[k + 1], args[k + 2]
    end
  end
  each_chunk(t, some, from, function(chunk, ranges)
    if t.stages[i].ended then
      ack_rows(t, chunk, i, ranges)
      return
    end
    local mine, uses = leased_rows(t, chunk, i, ranges), {}
    if final.state ~= 'trained' then
      end_rows(t, chunk, mine, final, i, 0)
      return
    end
    each_run(chunk, mine, function(sig, _, first, rows)
      local use = string.byte(sig, 2) - FIRST
      uses[use] = uses[use] or {}
      table.insert(uses[use], first)
      table.insert(uses[use], rows)
    end)
    for use, list in pairs(uses) do use_rows(t, chunk, list, i, final.step, use) end
  end)
  local over = true
  each_chunk(t, held.fields, 5, function(chunk, ranges)
    if leased_rows(t, chunk, i, ranges)[1] then over = false end
  end)
  if over then
    end_lease(t, held, args[3])
  elseif t.config.max_uses > 1 then  -- rows that are ready again are not this lease's any more
    local record = {held.serial, held.due, i, held.worker}
    each_chunk(t, held.fields, 5, function(chunk, ranges)
      local list = leased_rows(t, chunk, i, ranges)
      for k = 1, #list, 2 do
        local n = #record
        record[n + 1], record[n + 2], record[n + 3] = chunk.id, list[k], list[k + 1]
      end
    end)
    redis.call('HSET', t.prefix .. KEY.leases, held.slot, cmsgpack.pack(record))
  end
  return {'ok', over and 1 or 0}
end)

-- lose(slot, serial, call, stage, number of units, units..., {chunk, first, count}...): what the stage made of these rows of the claim
-- is gone; they are not the claim's any more. {"ok", 0}.
under_lease('lose', function(t, held, args)
  local i, maker, split, some = held.stage, args[4], 5 + args[5], {}
  local how, key = {i, maker, {unpack(args, 6, split)}}, 'lose' .. held.stage .. '/' .. args[4]
  for k = split + 1, #args do some[#some + 1] = args[k] end
  each_chunk(t, some, 1, function(chunk, ranges)
    local lost = move(t, chunk, ranges, key, to_lost, how)
    add_to(t, i, TAKEN, -lost)
    add_to(t, maker, TAKEN, -lost)
    join(t, chunk)
  end)
  return {'ok', 0}
end)

-- Take away the leases of stage i on rows that are used more than once and redone now: they would outlive this use.
-- `redone` maps chunks to lists of {first, end}. Returns the leases' records.
local function take_leases(t, i, redone)
  local found = {}
  local function overlaps(f)
    for r = 5, #f, 3 do
      for _, one in ipairs(redone[f[r]] or {}) do
        if f[r + 1] < one[2] and one[1] < f[r + 1] + f[r + 2] then return true end
      end
    end
  end
  local all = redis.call('HGETALL', t.prefix .. KEY.leases)
  for k = 1, #all, 2 do
    local f = cmsgpack.unpack(all[k + 1])
    if f[2] > 0 and f[3] == i and overlaps(f) then
      redis.call('HDEL', t.prefix .. KEY.leases, all[k])
      found[#found + 1] = f
    end
  end
  return found
end

-- finish_logged(stage index, step, {chunk, producer, sequence, first, count, use}...): {"ok"}, or {"conflict", chunk} when the
-- rows ended otherwise. Freed chunks are past; rows of chunks that are still to come are noted.
of_table('finish_logged', function(t, args)
  local stage, step = args[1], args[2]
  local conflict, redone = nil, {}
  for k = 3, #args, 6 do
    local chunk, use = chunk_of(t, args[k]), args[k + 5]
    if chunk then
      each_run(chunk, {args[k + 3], args[k + 4]}, function(sig, _, from, rows)
        if not string.find(sig, '^[otT]') then conflict = args[k] end
        if string.byte(sig, 2) - FIRST <= use then
          redone[args[k]] = redone[args[k]] or {}
          table.insert(redone[args[k]], {from, from + rows})
        end
      end)
    end
  end
  if conflict then return {'conflict', conflict} end
  local taken = t.config.max_uses > 1 and take_leases(t, stage, redone) or {}  -- else the rows end, whoever holds them
  for k = 3, #args, 6 do
    local chunk = chunk_of(t, args[k])
    local first, count, use = args[k + 3], args[k + 4], args[k + 5]
    if chunk then
      use_rows(t, chunk, {first, count}, stage, step, use)
    else
      local mark = redis.call('HGET', t.prefix .. KEY.marks, args[k + 1])
      if not mark or not reaches(mark, args[k + 2]) then
        local at, note = t.prefix .. KEY.logged, table.concat({stage, first, count, use, step}, ':') .. ';'
        local noted = redis.call('HGET', at, args[k]) or ''
        if noted == '' then t.state[LOGGED] = t.state[LOGGED] + 1 end
        if not string.find(noted, note, 1, true) then redis.call('HSET', at, args[k], noted .. note) end
      end
    end
  end
  for _, f in ipairs(taken) do
    local reason = {'dead(worker ended)', 'worker ended\nand another one redid its batch; last worker ' .. f[4]}
    each_chunk(t, f, 5, function(chunk, ranges) give_back(t, chunk, stage, ranges, true, reason) end)
  end
  commit(t)
  return {'ok'}
end, 'allow-oom')

-- advance(step): a checkpoint covers the step. {"ok", chunk ranges still to do}: the client repeats until 0.
of_table('advance', function(t, args)
  local step, at = args[1], t.prefix .. KEY.trained
  t.state[DURABLE] = math.max(t.state[DURABLE], step + 1)
  local members = redis.call('ZRANGEBYSCORE', at, '-inf', step, 'LIMIT', 0, MOST_RANGES)
  for _, member in ipairs(members) do
    local id, first, count = string.match(member, '^(.*):(%d+):(%d+)$')
    local chunk = chunk_of(t, id)
    if chunk then move(t, chunk, {tonumber(first), tonumber(count)}, 'durable', to_durable) end
  end
  if #members > 0 then redis.call('ZREM', at, unpack(members)) end
  commit(t)
  return {'ok', redis.call('ZCOUNT', at, '-inf', step)}
end, 'allow-oom')

-- expire(): {"ok", leases that were over}.
of_table('expire', function(t, args)
  if t.now < t.state[DUE] then return {'ok', 0} end
  local leases = expire(t, 64)
  commit(t)
  return {'ok', leases}
end, 'allow-oom')

-- recover(worker, client that asks): gives back what earlier processes of this worker hold, counted.
-- {"ok", leases}.
of_table('recover', function(t, args)
  local all, leases = redis.call('HGETALL', t.prefix .. KEY.leases), 0
  for k = 1, #all, 2 do
    local f = cmsgpack.unpack(all[k + 1])
    if f[2] > 0 and f[4] == args[1] and string.match(all[k], '^[^.]+') ~= args[2] then
      redis.call('HDEL', t.prefix .. KEY.leases, all[k])
      leases = leases + 1
      local reason = {'dead(worker ended)', 'worker ended\nwhile it held the row; last worker ' .. f[4]}
      each_chunk(t, f, 5, function(chunk, ranges) give_back(t, chunk, f[3], ranges, true, reason) end)
    end
  end
  commit(t)
  return {'ok', leases}
end, 'allow-oom')

-- forget(slot...): leases of a client that ends and repeats nothing any more.
register('forget', function(keys, args)
  for _, slot in ipairs(args) do
    local packed = redis.call('HGET', keys[1] .. KEY.leases, slot)
    if packed and cmsgpack.unpack(packed)[2] == 0 then redis.call('HDEL', keys[1] .. KEY.leases, slot) end
  end
  return {'ok'}
end, 'allow-oom')
