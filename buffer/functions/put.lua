-- Opening tables, adding chunks, writing columns. The payload is in the server before the function runs (same
-- transaction); a refused call unlinks it again.

local function number_or_nil(text) return text ~= '' and tonumber(text) or nil end

local function same_shape(a, b)
  return a.scope == b.scope and a.ended == b.ended and table.concat(a.needs, ',') == table.concat(b.needs, ',')
    and a.selector == b.selector
end

-- open(schema fingerprint, random number, client, worker, columns, limits, stage...): create the table or compare; new
-- stages are added. The number names this state of the configuration. Replies {"ok", {columns, limits, stage...}, {index of
-- each stage that has live rows to adopt...}}, {"schema", theirs} or {"shape", name of the stage}.
register('open', function(keys, args)
  local prefix = keys[1]
  local packed, known, added = redis.call('GET', prefix .. KEY.config), {}, {}
  local blobs, changed, remade = {args[5], args[6]}, false, {}
  if packed then
    blobs = cmsgpack.unpack(packed)
    local theirs = cmsgpack.unpack(blobs[1]).schema
    if theirs ~= args[1] then return {'schema', theirs} end
    if blobs[2] ~= args[6] then blobs[2], changed = args[6], true end
    for k = 3, #blobs do known[cmsgpack.unpack(blobs[k]).name] = k end
  end
  for k = 7, #args do
    local stage = cmsgpack.unpack(args[k])
    local at = known[stage.name]
    if not at then
      blobs[#blobs + 1], changed = args[k], true
      if packed then added[#added + 1] = #blobs - 2 end
    elseif blobs[at] ~= args[k] then
      local theirs = cmsgpack.unpack(blobs[at])
      if not same_shape(stage, theirs) then return {'shape', stage.name} end
      if (stage.min_batch > 1) ~= (theirs.min_batch > 1) then remade[#remade + 1] = at - 2 end
      blobs[at], changed = args[k], true
    end
  end
  if changed then
    local old = packed and open_table(keys)
    local state, fields = {}, base_of(#blobs - 1)
    for k = 1, fields do state[k] = old and old.state[k] or 0 end
    if old then
      for k = old.config.fields + 1, fields do state[k] = 0 end
      for _, i in ipairs(added) do state[base_of(i) + PAST] = state[ENDED] end
    else
      state[DUE] = math.huge
    end
    state[VERSION] = tonumber(args[2])
    redis.call('SET', prefix .. KEY.config, cmsgpack.pack(blobs))
    redis.call('SET', prefix .. KEY.state, struct.pack('<' .. string.rep('d', fields), unpack(state, 1, fields)))
    for _, i in ipairs(remade) do  -- `adopt` fills them anew
      unlink({prefix .. KEY.open .. i, prefix .. KEY.since .. i})
      added[#added + 1] = i
    end
  end
  redis.call('HSET', prefix .. KEY.clients, args[3], args[4])
  return {'ok', blobs, added}
end, 'allow-oom')

-- attach(): {"ok", {columns, limits, stage...}}.
register('attach', function(keys)
  local packed = redis.call('GET', keys[1] .. KEY.config)
  if not packed then return {'unknown'} end
  return {'ok', cmsgpack.unpack(packed)}
end, 'no-writes')

-- adopt(chunk...): rows of these chunks meet the stages that were added, or took up min_batch, after them. {"ok"}.
register('adopt', function(keys, args)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  for _, id in ipairs(args) do
    local chunk = chunk_of(t, id)
    if chunk then
      chunk.dirty = true
      move(t, chunk, all_rows(chunk), 'settle', to_settled)
      join(t, chunk)
      for i, stage in ipairs(t.stages) do
        local at = t.config.pos[i]
        if stage.min_batch > 1 and (has(chunk.runs, at, 119) or has(chunk.runs, at, 99)) then
          zadd(t, t.prefix .. KEY.open .. i, chunk.ordinal, id)
        end
        if stage.min_batch > 1 and has(chunk.runs, at, 114) then zadd(t, t.prefix .. KEY.since .. i, t.now, id) end
      end
    end
  end
  commit(t)
  return {'ok'}
end, 'allow-oom')

-- Pieces in the arguments: {chunk, unit, tag, number, {first, count, bytes}...}..., those of one chunk and unit together and in
-- order of their rows. A piece is named by its tag, the k-th of several by tag.k.

-- Call fn(chunk, unit, tag, index of the first piece's first row, number of pieces).
local function each_group(args, at, fn)
  while at <= #args do
    local number = tonumber(args[at + 3])
    fn(args[at], tonumber(args[at + 1]), args[at + 2], at + 4, number)
    at = at + 4 + 3 * number
  end
end

-- A piece as the chunk's record names it: name:first:count:bytes:milliseconds after the put:version:tag;
local function rest_of_entry(after_ms, version, told)
  return ':' .. (after_ms == 0 and '0' or after_ms) .. ':' .. version .. ':' .. told .. ';'
end

local function entry(name, first, count, bytes, rest) return name .. ':' .. first .. ':' .. count .. ':' .. bytes .. rest end

local function piece_name(tag, number, k) return number == 1 and tag or tag .. '.' .. k - 1 end

local function group_keys(prefix, keys, id, unit, tag, number)
  for k = 1, number do keys[#keys + 1] = payload_key(prefix, id, unit, piece_name(tag, number, k)) end
end

-- Unlink the payload that came with a call which is refused.
local function refuse(keys, args, at, reply)
  local names = {}
  each_group(args, at, function(id, unit, tag, _, number) group_keys(keys[1], names, id, unit, tag, number) end)
  unlink(names)
  return reply
end

-- Unlink pieces that no chunk refers to: those of a repeated call.
local function drop_unreferenced(t, args, at)
  local names = {}
  each_group(args, at, function(id, unit, tag, _, number)
    local chunk = chunk_of(t, id)
    for k = 1, number do
      local name = piece_name(tag, number, k)
      local held = chunk and string.find(';' .. chunk.pieces[unit], ';' .. name .. ':', 1, true)
      if not held then names[#names + 1] = payload_key(t.prefix, id, unit, name) end
    end
  end)
  unlink(names)
end

-- Unlink pieces of a unit that those of this tag and these ranges replace wholly. Returns the entries of the others, and the bytes of
-- the replaced ones.
local function keep_visible(t, chunk, unit, tag, number, ranges)
  local own, left, replaced, bytes = {}, {}, {}, 0
  for k = 1, number do own[piece_name(tag, number, k)] = true end
  for one in string.gmatch(chunk.pieces[unit], '[^;]+;') do
    local name, from, rows, size = string.match(one, '^([^:]*):(%d+):(%d+):(%d+)')
    local stop = from + rows
    from = tonumber(from)
    local gone = own[name]
    for k = 1, gone and 0 or #ranges, 2 do
      if from >= ranges[k] and stop <= ranges[k] + ranges[k + 1] then
        gone = true
        replaced[#replaced + 1] = payload_key(t.prefix, chunk.id, unit, name)
        break
      end
    end
    if gone then bytes = bytes + size else left[#left + 1] = one end
  end
  unlink(replaced)
  return table.concat(left), bytes
end

-- Enter pieces of one unit in the chunk: what they replace wholly is unlinked, their rows have the unit's columns from now on.
local function enter(t, chunk, unit, tag, args, at, number, version, told)
  local first, count, bytes, rest = args[at], args[at + 1], args[at + 2], rest_of_entry(t.now - chunk.at, version, told)
  local ranges, text = {tonumber(first), tonumber(count)}, entry(piece_name(tag, number, 1), first, count, bytes, rest)
  if number > 1 then
    local entries = {text}
    for k = 2, number do
      at = at + 3
      first, count = args[at], args[at + 1]
      entries[k] = entry(piece_name(tag, number, k), first, count, args[at + 2], rest)
      ranges[2 * k - 1], ranges[2 * k] = tonumber(first), tonumber(count)
      bytes = bytes + args[at + 2]
    end
    text = table.concat(entries)
  end
  if chunk.pieces[unit] ~= '' then
    local left, replaced_bytes = keep_visible(t, chunk, unit, tag, number, ranges)
    text, bytes = left .. text, bytes - replaced_bytes
  end
  chunk.pieces[unit] = text
  chunk.bytes = chunk.bytes + bytes
  chunk.dirty = true
  t.state[BYTES] = t.state[BYTES] + bytes
  move(t, chunk, ranges, t.config.unit_moves[unit], to_present, unit)
end

-- The ordinary stage with most rows to do: it must drain when the table is full.
local function slowest_stage(t)
  local worst, most = '', -1
  for i, stage in ipairs(t.stages) do
    local rows = stage_state(t, i, READY) + stage_state(t, i, LEASED)
    if not stage.ended and rows > most then worst, most = stage.name, rows end
  end
  return worst, most
end

-- Rows that the batch log knew before the server did: it came back older, and the chunk was put again.
local function end_logged(t, chunk)
  if t.state[LOGGED] == 0 then return end
  local at = t.prefix .. KEY.logged
  local noted = redis.call('HGET', at, chunk.id)
  if not noted then return end
  redis.call('HDEL', at, chunk.id)
  t.state[LOGGED] = t.state[LOGGED] - 1
  for stage, first, count, use, step in string.gmatch(noted, '(%d+):(%d+):(%d+):(%d+):(%d+);') do
    use_rows(t, chunk, {tonumber(first), tonumber(count)}, tonumber(stage), tonumber(step), tonumber(use))
  end
end

-- The signature of rows that are put with these units ("put1,2,"); it is remembered under their names.
local function new_rows(config, units)
  local sig = config.blank
  for unit in string.gmatch(units, '%d+') do sig = to_present(config, sig, tonumber(unit)) end
  for _, i in ipairs(config.grouped) do
    if not config.stages[i].group_deadline_ms then sig = to_joined(config, sig, i) or sig end
  end
  count_learnt(config)
  config.memo[units] = sig
  return sig
end

-- put(schema fingerprint, producer, sequence, the client's last one, chunk, rows, group size, 1 to close, version, tokens, tag, pieces...),
-- with one piece of all rows for each unit that is there: {"ok", live rows}, {"known", last sequence}, {"schema", theirs}, {"older", last sequence known}, or {"full", limit, value, most, stage, rows to do}.
register('put', function(keys, args)
  local t = open_table(keys)
  if not t then return refuse(keys, args, 12, {'unknown'}) end
  if t.config.schema ~= args[1] then return refuse(keys, args, 12, {'schema', t.config.schema}) end
  local sequence, id, rows = tonumber(args[3]), args[5], tonumber(args[6])
  local mark = redis.call('HGET', t.key.marks, args[2])
  if mark and tonumber(mark) >= sequence then
    drop_unreferenced(t, args, 12)
    return {'known', mark}
  end
  if args[4] ~= '' and args[4] ~= mark then return refuse(keys, args, 12, {'older', mark or 'none'}) end
  local bytes = 0
  for k = 18, #args, 7 do bytes = bytes + args[k] end
  local limit = put_limit(t, rows, bytes)
  if limit then
    local stage, todo = slowest_stage(t)
    local value, most = string.format('%.17g', limit[2]), string.format('%.17g', limit[3])
    return refuse(keys, args, 12, {'full', limit[1], value, most, stage, todo})
  end
  redis.call('HSET', t.key.marks, args[2], args[3])
  local state, config = t.state, t.config
  state[ORDINAL] = state[ORDINAL] + 1
  state[ADMITTED] = state[ADMITTED] + rows
  state[BYTES] = state[BYTES] + bytes
  local pieces, units, rest = {unpack(config.no_pieces)}, 'put', rest_of_entry(0, args[9], args[11])
  for k = 13, #args, 7 do
    local unit = tonumber(args[k])
    pieces[unit], units = entry(args[k + 1], '0', args[6], args[k + 5], rest), units .. args[k] .. ','
  end
  local chunk = {
    runs = {rows, number_or_nil(args[9]) or -1, config.memo[units] or new_rows(config, units)}, n = rows, group = tonumber(args[7]),
    ordinal = state[ORDINAL], bytes = bytes, at = t.now, last = -1, why = '', tokens = args[10], pieces = pieces,
    id = id, before = NONE, counted = false, rest = false, dirty = true, ends = false,
  }
  t.chunks[id] = chunk
  t.order[1] = chunk
  if config.timed[1] then join(t, chunk) end
  if args[8] == '1' then state[CLOSED] = state[ORDINAL] end
  end_logged(t, chunk)
  commit(t)
  return {'ok', live_rows(t)}
end)

-- flush(): the rows put so far are complete.
register('flush', function(keys)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  t.state[CLOSED] = t.state[ORDINAL]
  commit(t)
  return {'ok'}
end, 'allow-oom')

-- set_version(version): the trainer's; it only grows.
register('set_version', function(keys, args)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  t.state[TRAINER] = math.max(t.state[TRAINER], tonumber(args[1]))
  t.roomier = true
  commit(t)
  return {'ok'}
end, 'allow-oom')

-- write(lease, call, 1 to ack, version, tokens, tag, pieces...): {"ok"} or {"fenced"}. Tokens are those of the lease's rows in order.
register('write', function(keys, args)
  local t = open_table(keys)
  if not t then return refuse(keys, args, 7, {'unknown'}) end
  local held = lease_of(t, slot_of(args[1]))
  if held and held.over and held.call == args[2] then
    drop_unreferenced(t, args, 7)
    return {'ok'}
  end
  if not held or held.over then
    t.state[FENCED] = t.state[FENCED] + 1
    commit(t)
    return refuse(keys, args, 7, {'fenced'})
  end
  local orphans, version, f = {}, number_or_nil(args[4]), held.fields
  if f[8] then
    local ids = {}
    for k = 5, #f, 3 do ids[#ids + 1] = f[k] end
    prefetch(t, ids, 1, #ids)
  end
  each_group(args, 7, function(id, unit, tag, at, number)
    local chunk = chunk_of(t, id)
    if chunk then
      enter(t, chunk, unit, tag, args, at, number, args[4], args[6])
    else
      group_keys(t.prefix, orphans, id, unit, tag, number)
    end
  end)
  if orphans[1] then unlink(orphans) end
  if args[5] ~= '' then
    local at = 0
    for k = 5, #f, 3 do
      local chunk, count = chunk_of(t, f[k]), f[k + 2]
      if chunk then set_tokens(chunk, f[k + 1], string.sub(args[5], 4 * at + 1, 4 * (at + count))) end
      at = at + count
    end
  end
  each_chunk(t, f, 5, function(chunk, ranges)
    if version then set_version(chunk, ranges, version) end
    if args[3] == '1' then ack_rows(t, chunk, held.stage, ranges) end
    join(t, chunk)
  end)
  if args[3] == '1' then end_lease(t, held, args[2]) end
  commit(t)
  return {'ok'}
end)
