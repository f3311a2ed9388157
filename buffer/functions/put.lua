-- Opening tables, adding chunks, writing columns. The payload is in the server before the function runs (same
-- transaction); a refused call unlinks it again.
--
-- A piece in the arguments: first, count, unit, columns ('' is all of the unit, else "0,2"), bytes, name.

local PIECE = 6

-- open(version, config, schema, shape): create the table or compare. Replies {"ok"} or {"schema"|"shape", theirs}.
register('open', function(keys, args)
  local at = keys[1] .. KEY.state
  local known = redis.call('HMGET', at, 'schema', 'shape')
  if known[1] and known[1] ~= args[3] then return {'schema', known[1]} end
  if known[2] and known[2] ~= args[4] then return {'shape', known[2]} end
  redis.call('HSET', keys[1] .. KEY.config, args[1], args[2])
  redis.call('HSET', at, 'version', args[1], 'schema', args[3], 'shape', args[4])
  return {'ok'}
end, 'allow-oom')

local function pieces_from(args, at)
  local pieces = {}
  for k = at, #args, PIECE do
    pieces[#pieces + 1] = {
      first = tonumber(args[k]), count = tonumber(args[k + 1]), unit = tonumber(args[k + 2]),
      columns = args[k + 3], bytes = tonumber(args[k + 4]), name = args[k + 5],
    }
  end
  return pieces
end

-- Unlink pieces that no chunk refers to: those of a refused call, or of a repeated one.
local function drop_unreferenced(t, pieces)
  local names, held = {}, {}
  for _, piece in ipairs(pieces) do
    local id = string.match(piece.name, '^(.*)/')
    if held[id] == nil then
      held[id] = {}
      local chunk = chunk_of(t, id)
      if chunk then
        for _, name in ipairs(piece_names(chunk, t.config.units)) do held[id][name] = true end
      end
    end
    if not held[id][piece.name] then names[#names + 1] = piece.name end
  end
  unlink(t, names)
end

-- The reply for a table that the server does not know (any more).
local function unknown_table(keys, pieces)
  local names = {}
  for _, piece in ipairs(pieces) do names[#names + 1] = piece.name end
  unlink({prefix = keys[1]}, names)
  return {'unknown'}
end

-- Enter the piece in the chunk: what it replaces wholly is unlinked, rows have its columns from now on.
local function add_piece(t, chunk, piece)
  local field, unit = 'p' .. piece.unit, 'u' .. piece.unit
  local kept, replaced, bytes = {}, {}, piece.bytes
  for entry in string.gmatch(chunk.fields[field] or '', '[^;]+') do
    local name, first, count, columns, size = string.match(entry, '^([^:]*):(%d+):(%d+):([^:]*):(%d+)$')
    first, count = tonumber(first), tonumber(count)
    local covered = first >= piece.first and first + count <= piece.first + piece.count
    if name == piece.name then
      bytes = bytes - tonumber(size)
    elseif covered and (piece.columns == '' or piece.columns == columns) then
      replaced[#replaced + 1] = name
      bytes = bytes - tonumber(size)
    else
      kept[#kept + 1] = entry
    end
  end
  unlink(t, replaced)
  kept[#kept + 1] = table.concat({piece.name, piece.first, piece.count, piece.columns, piece.bytes}, ':')
  set_field(chunk, field, table.concat(kept, ';') .. ';')
  set_field(chunk, 'b', tostring(tonumber(chunk.fields.b) + bytes))
  bump(t, 'bytes', bytes)
  if piece.columns == '' then
    set_rows(chunk, unit, piece.first, piece.count, '1')
    return
  end
  local names = {}
  for column in string.gmatch(piece.columns, '%d+') do
    set_rows(chunk, 'c' .. piece.unit .. '_' .. column, piece.first, piece.count, '1')
  end
  for k = 0, t.config.unit_columns[piece.unit] - 1 do names[#names + 1] = 'c' .. piece.unit .. '_' .. k end
  each_run(chunk, names, piece.first, piece.count, function(from, rows, chars)
    for k = 1, #chars do
      if chars[k] ~= '1' then return end
    end
    set_rows(chunk, unit, from, rows, '1')
  end)
end

-- The ordinary stage with most rows to do: it must drain when the table is full.
local function slowest_stage(t)
  local worst, most = '', -1
  for i, stage in ipairs(t.stages) do
    local rows = state(t, 'r' .. i) + state(t, 'l' .. i)
    if not stage.ended and rows > most then worst, most = stage.name, rows end
  end
  return worst, most
end

-- Rows that the batch log knew before the server did: it came back older, and the chunk was put again.
local function end_logged(t, chunk)
  local at = t.prefix .. KEY.logged
  local noted = redis.call('HGET', at, chunk.id)
  if not noted then return end
  redis.call('HDEL', at, chunk.id)
  for stage, first, count, step in string.gmatch(noted, '(%d+):(%d+):(%d+):(%d+);') do
    local final = {state = 'trained', label = 'trained', reason = '', step = tonumber(step)}
    end_rows(t, chunk, tonumber(first), tonumber(count), final, tonumber(stage))
  end
end

-- put(producer, sequence, chunk, rows, group size, pieces...): {"ok"}, {"known"} or {"full", live, capacity, stage, rows}.
register('put', function(keys, args)
  local t = open_table(keys)
  local pieces = pieces_from(args, 6)
  if not t then return unknown_table(keys, pieces) end
  local mark = redis.call('HGET', t.prefix .. KEY.marks, args[1])
  if mark and tonumber(mark) >= tonumber(args[2]) then
    drop_unreferenced(t, pieces)
    return {'known'}
  end
  local rows, live = tonumber(args[4]), state(t, 'live')
  if live + rows > t.config.capacity then
    drop_unreferenced(t, pieces)
    local stage, todo = slowest_stage(t)
    return {'full', live, t.config.capacity, stage, todo}
  end
  redis.call('HSET', t.prefix .. KEY.marks, args[1], args[2])
  local ordinal = redis.call('HINCRBY', t.prefix .. KEY.state, 'chunks', 1)
  local fields = {n = args[4], g = args[5], o = tostring(ordinal), b = '0'}
  local chunk = add_chunk(t, {id = args[3], n = rows, group = tonumber(args[5]), fields = fields, before = {}})
  for name in pairs(fields) do chunk.before[name] = false end
  bump(t, 'admitted', rows)
  bump(t, 'live', rows)
  for i = 1, #t.stages do bump(t, 'w' .. i, rows) end
  for _, piece in ipairs(pieces) do add_piece(t, chunk, piece) end
  settle(t, chunk, 0, rows)
  end_logged(t, chunk)
  commit(t)
  return {'ok'}
end)

-- Has this client's operation been applied before (its reply was lost)?
local function applied(t, client, serial)
  return redis.call('HGET', t.prefix .. KEY.applied, client) == serial
end

local function mark_applied(t, client, serial)
  redis.call('HSET', t.prefix .. KEY.applied, client, serial)
end

-- write(client, serial, lease, 1 to ack, pieces...): {"ok"} or {"fenced"}. The chunk of a piece is in its name.
register('write', function(keys, args)
  local t = open_table(keys)
  local pieces = pieces_from(args, 5)
  if not t then return unknown_table(keys, pieces) end
  if applied(t, args[1], args[2]) then
    drop_unreferenced(t, pieces)
    return {'ok'}
  end
  local held = lease_of(t, args[3])
  if not held then
    drop_unreferenced(t, pieces)
    return {'fenced'}
  end
  local orphans = {}
  for _, piece in ipairs(pieces) do
    local chunk = chunk_of(t, string.match(piece.name, '^(.*)/'))
    if chunk then
      add_piece(t, chunk, piece)
      settle(t, chunk, piece.first, piece.count)
    else
      orphans[#orphans + 1] = piece.name
    end
  end
  unlink(t, orphans)
  if args[4] == '1' then
    each_range(t, held.ranges, function(chunk, first, count) ack_rows(t, chunk, held.stage, first, count) end)
    drop_lease(t, args[3])
  end
  mark_applied(t, args[1], args[2])
  commit(t)
  return {'ok'}
end)
